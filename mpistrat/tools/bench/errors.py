"""Errors that the parts of a benchmark raise. The command line reports them."""

from __future__ import annotations


class UsageError(Exception):
    """The arguments do not fit the job or its files. Every rank raises it; the command line prints the message."""


class CannotTakePart(Exception):
    """A peer is installed but cannot do this work here. The message says why."""
