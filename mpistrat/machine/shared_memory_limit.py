"""How much memory a rank may share with the others of its node."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from mpistrat.errors import TopologyError

SHARED_MB = "MPISTRAT_SHARED_MB"  # megabytes (10^6); not set: no limit; "0": none, everything goes through MPI


def shared_bytes(environ: Mapping[str, str] | None = None) -> float:
    """The most that a rank may share. Raises: TopologyError when the setting is no number >= 0."""
    text = (os.environ if environ is None else environ).get(SHARED_MB, "inf")
    try:
        megabytes = float(text)
        if not megabytes >= 0:
            raise ValueError
    except ValueError:
        raise TopologyError(
            f"{SHARED_MB}={text!r:.80}: expected megabytes of shared memory for a rank; 0 shares none"
        ) from None
    return math.inf if math.isinf(megabytes) else megabytes * 1e6
