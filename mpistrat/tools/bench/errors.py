"""What the parts of a benchmark raise for its command line."""

from __future__ import annotations


class UsageError(Exception):
    """Arguments that do not fit the job or its files. Raised by every rank; the message is for the command line."""


class CannotTakePart(Exception):
    """Why a peer that is installed cannot do this work here."""
