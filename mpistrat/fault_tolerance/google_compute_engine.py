"""Asks Google Compute Engine whether this virtual machine is about to be ended."""

from __future__ import annotations

from mpistrat.cluster_resolver.metadata_server import read_metadata

# Keys of the metadata server, each with the value that announces the end.
_ANNOUNCEMENTS = (
    ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    ("instance/preempted", "TRUE"),
)


def maintenance_is_near() -> bool:
    """Whether the metadata server says that this machine will be ended. Raises: OSError if no server answers in 7 s."""
    return any(
        (read_metadata(what) or "").strip() == announced for what, announced in _ANNOUNCEMENTS
    )
