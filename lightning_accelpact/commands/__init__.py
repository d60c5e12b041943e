"""The commands of the console script ``accelpact``, one a file."""


class CommandError(Exception):
    """The command cannot be carried out; the message says why and what to do."""
