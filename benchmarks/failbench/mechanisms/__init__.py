"""Ways to survive failures: one file each."""
