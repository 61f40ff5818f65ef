"""Costs in a file, which later jobs read.

The file's name is a hash of what the costs depend on; the file holds that, too. If anything is wrong with the file or
its folder, the costs are measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from typing import Any

from mpistrat.communicators.costs.model import Cost
from mpistrat.machine.private_files import make_folder

# Increased when the cost of a way changes, so that what other versions measured is not used.
FORMAT = 2
SECONDS_TO_LIVE = 7 * 86400.0  # so that what was measured on a busy machine is forgotten
_SECONDS_AHEAD = 3600.0  # the clock of the node that wrote the file may be so far ahead


def path_of(folder: str, key: dict[str, Any]) -> str:
    import hashlib  # here, because it makes importing mpistrat slower

    digest = hashlib.blake2b(_text_of(key).encode(), digest_size=8).hexdigest()
    return os.path.join(folder, f"costs-{digest}.json")


def read(folder: str, key: dict[str, Any]) -> tuple[dict[str, Cost], float] | None:
    """The costs of each way by `key`, and when they were measured, in seconds since 1970; None if there are none."""
    try:
        with open(path_of(folder, key), encoding="utf-8") as file:
            content = json.load(file)
        age = time.time() - content["measured"]
        if content["format"] != FORMAT or _text_of(content["key"]) != _text_of(key):
            return None
        if not -_SECONDS_AHEAD < age < SECONDS_TO_LIVE:
            return None
        costs = {
            str(way): Cost(float(terms["alpha"]), float(terms["beta"]), float(terms["error"]))
            for way, terms in content["costs"].items()
        }
        measured = float(content["measured"])
    except Exception:  # of any class: somebody else may have written the file, or half of it
        return None
    terms = [term for cost in costs.values() for term in dataclasses.astuple(cost)]
    return (costs, measured) if all(math.isfinite(t) and t >= 0 for t in terms) else None


def write(folder: str, key: dict[str, Any], costs: dict[str, Cost]) -> None:
    """Write the file as a whole, whoever else writes it at the same time; remove files that are too old to be read."""
    import tempfile  # here, because it makes importing mpistrat slower

    content = {
        "format": FORMAT,
        "key": key,
        "measured": time.time(),
        "costs": {way: dataclasses.asdict(cost) for way, cost in costs.items()},
    }
    with contextlib.suppress(OSError):  # a home that is read-only, or full
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
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("costs-"):
                with contextlib.suppress(OSError):  # another job has removed it
                    if time.time() - entry.stat().st_mtime > SECONDS_TO_LIVE:
                        os.unlink(entry.path)


def _text_of(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
