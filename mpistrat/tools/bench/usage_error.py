"""What somebody who starts a benchmark got wrong."""


class UsageError(Exception):
    """Arguments that do not fit the job or its files. Raised by every rank; the message is for the command line."""
