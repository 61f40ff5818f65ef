"""Messages of a job's ranks, as they come."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any


class Unreadable:
    """Comes in place of a message that cannot be unpickled. Args: error: why."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def read_message(data: bytes | bytearray, buffers: Sequence[Any] = ()) -> Any:
    """What was pickled; Unreadable does not keep others from being read."""
    try:
        return pickle.loads(data, buffers=buffers)
    except Exception as error:
        return Unreadable(error)
