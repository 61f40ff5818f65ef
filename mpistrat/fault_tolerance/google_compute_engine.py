"""What a virtual machine of Google Compute Engine is told about its end."""

from __future__ import annotations

_URL = "http://metadata.google.internal/computeMetadata/v1/instance/"
# What is asked, and the answer that announces the end.
_ANNOUNCEMENTS = (
    ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"),
    ("preempted", "TRUE"),
)
_SECONDS = 5.0


def maintenance_is_near() -> bool:
    """Whether the metadata server says that this machine is about to be ended. Raises: OSError where there is none."""
    import urllib.request  # here, because it makes importing mpistrat slower

    for what, announced in _ANNOUNCEMENTS:
        request = urllib.request.Request(_URL + what, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            if answer.read().decode().strip() == announced:
                return True
    return False
