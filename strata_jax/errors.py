"""What callers may catch. Every class carries the exit code of the command line."""


class StrataError(Exception):
    """Base of all errors that a user can cause or meet; its text is the whole message."""

    exit_code = 1


class UsageError(StrataError):
    """Flags, settings or ids that cannot be used (unknown, out of range, contradictory)."""

    exit_code = 2


class CapacityError(StrataError):
    """What was asked for does not fit; the text says need, have and what would fit."""

    exit_code = 3


class BadFileError(StrataError):
    """A model file that is missing, unreadable, broken or not what its header says."""

    exit_code = 4
