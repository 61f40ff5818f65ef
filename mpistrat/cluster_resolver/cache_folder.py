"""Where measurements are kept from one job to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping

CACHE = (
    "MPISTRAT_CACHE"  # a folder; "off" keeps nothing; not set: mpistrat in the user's cache folder
)
USERS_CACHE = "XDG_CACHE_HOME"  # "/home/ann/.cache"; the standard has a relative one ignored


def cache_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """It need not exist. None: nothing is kept, for the user says so, or has no home."""
    environ = os.environ if environ is None else environ
    given = environ.get(CACHE, "")
    if given:
        return None if given.lower() == "off" else os.path.abspath(given)
    users = environ.get(USERS_CACHE, "")
    if not os.path.isabs(users):
        home = environ.get("HOME") or os.path.expanduser("~")
        users = os.path.join(home, ".cache")
    return os.path.join(users, "mpistrat") if os.path.isabs(users) else None
