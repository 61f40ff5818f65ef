"""What the user allows a rank to wait for the others."""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpistrat.cluster_resolver.start_deadline import seconds_setting
from mpistrat.errors import TopologyError

STALL_SECONDS = "MPISTRAT_STALL_SECONDS"  # "60"; "0" waits for ever
ON_STALL = (
    "MPISTRAT_ON_STALL"  # "end" (default): the job ends; "raise": StallError on the ranks that wait
)


def stall_seconds(environ: Mapping[str, str] | None = None) -> float:
    """How long a collective may last. Raises: TopologyError when the setting is no number >= 0."""
    return seconds_setting(STALL_SECONDS, "60", environ)


def raises_on_stall(environ: Mapping[str, str] | None = None) -> bool:
    text = (os.environ if environ is None else environ).get(ON_STALL, "end")
    if text not in ("end", "raise"):
        raise TopologyError(f"{ON_STALL}={text!r:.80}: expected end or raise")
    return text == "raise"
