"""The command line `polyreme`. One module per sub-command; see `main.COMMANDS`."""

from __future__ import annotations


class UsageError(Exception):
    """What the user asked for cannot be done as asked. The message names what was given and the
    remedy; `main` prints it and exits with code 2."""
