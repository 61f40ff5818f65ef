"""A file of measured times, for later jobs.

The file's name is a hash of a key: everything that the costs depend on (routes, MPI, settings, nodes, processors). The
file contains the key, too. If the file or its folder is missing, old or damaged, jobs measure the costs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from mpistrat.communicators.costs.observations import MOST, Observation, are_near
from mpistrat.liveness import deadlines
from mpistrat.machine.private_files import make_folder

# Increased when the cost of a route changes, so that jobs ignore the measurements of other versions.
FORMAT = 3


def path_of(folder: str, key: dict[str, Any]) -> str:
    import hashlib  # imported here, so that `import mpistrat` stays fast

    content = _text_of(key).encode()
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return os.path.join(folder, f"costs-{digest}.json")


def read(folder: str, key: dict[str, Any]) -> list[Observation]:
    """Return the measurements for `key` that are at most a week old, the newest last; [] without a usable file."""
    try:
        with open(path_of(folder, key), encoding="utf-8") as file:
            content = json.load(file)
        written = _text_of(content["key"])
        if (content["format"], written) != (FORMAT, _text_of(key)):
            return []
        found = [Observation(**fields) for fields in content["observations"]]
        if not all(observation.is_possible() for observation in found):
            return []
        oldest = time.time() - deadlines.COSTS_LIVE
        newest = time.time() + deadlines.COSTS_MAY_BE_AHEAD
        recent = [observation for observation in found if oldest < observation.when < newest]
        return sorted(recent, key=lambda observation: observation.when)
    except Exception:  # of any class: another program may have written the file, or half of it
        return []


def add(folder: str, key: dict[str, Any], observation: Observation) -> None:
    """Add an observation (one job's times) to the file for `key`, and remove files that are more than a week old.

    The file keeps the newest MOST observations at about the same distance. It is replaced as a whole, so other jobs
    never read half of it. If two jobs write at the same time, one may lose its observation. If the folder cannot be
    written, nothing happens and nothing is raised.
    """
    import tempfile  # imported here, so that `import mpistrat` stays fast

    kept = read(folder, key)
    near = [o for o in kept if are_near(o.distance, observation.distance)]
    far = [o for o in kept if o not in near]
    newest = [*near, observation][-MOST:]
    observations = [dataclasses.asdict(o) for o in (*far, *newest)]
    content = {"format": FORMAT, "key": key, "observations": observations}
    with contextlib.suppress(OSError):  # a home folder that is read-only, or full
        make_folder(folder)
        descriptor, unfinished = tempfile.mkstemp(prefix="costs-", suffix=".part", dir=folder)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file)
            os.replace(unfinished, path_of(folder, key))
        except OSError:
            os.unlink(unfinished)
            raise
        _remove_old(folder)


def _remove_old(folder: str) -> None:
    for path in Path(folder).glob("costs-*"):
        with contextlib.suppress(OSError):  # another job has removed the file
            age = time.time() - path.stat().st_mtime
            if age > deadlines.COSTS_LIVE:
                path.unlink()


def _text_of(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
