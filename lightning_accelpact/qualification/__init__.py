"""Qualification: finding out, on the user's own stack, which recovery actions hold there."""
