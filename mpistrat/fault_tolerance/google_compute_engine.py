"""What a virtual machine of Google Compute Engine is told about its end."""

from __future__ import annotations

from mpistrat.cluster_resolver.metadata_server import read_metadata

# What is asked, and the answer that announces the end.
_ANNOUNCEMENTS = (
    ("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    ("instance/preempted", "TRUE"),
)


def maintenance_is_near() -> bool:
    """Whether the metadata server says that this machine is about to be ended. Raises: OSError where there is none."""
    return any(
        (read_metadata(what) or "").strip() == announced for what, announced in _ANNOUNCEMENTS
    )
