"""Costs that a file keeps: what is read is what was written, or nothing."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpistrat.communicators.costs import cache as cost_cache
from mpistrat.communicators.costs.model import Cost

KEY: dict[str, Any] = {"mpi": "MPICH 5.0.2", "cpus": [("a processor", 4, 2)]}
COSTS = {"memory": Cost(1e-5, 1e-10, 0.1), "MPI": Cost(5e-6, 3e-10, 0.2)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = str(tmp_path / "not" / "there yet")
    assert cost_cache.read(folder, KEY) is None
    before = time.time()
    cost_cache.write(folder, KEY, COSTS)
    found = cost_cache.read(folder, KEY)
    assert found is not None
    assert found[0] == COSTS
    assert before <= found[1] <= time.time()
    assert cost_cache.read(folder, {**KEY, "mpi": "Open MPI v5.0.11"}) is None
    assert len(os.listdir(folder)) == 1


def changed(**fields: Any) -> Any:
    return lambda content: {**content, **fields}


@pytest.mark.parametrize(
    "change",
    [
        changed(format=cost_cache.FORMAT + 1),
        changed(key={"another": 1}),
        changed(measured=0),
        changed(measured=time.time() + 86400),
        changed(measured="yesterday"),
        changed(costs={"memory": {"alpha": 1e-5, "beta": 1e-10}}),
        changed(costs={"memory": {"alpha": 1e-5, "beta": float("nan"), "error": 0.1}}),
        changed(costs={"memory": {"alpha": 1e-5, "beta": -1e-10, "error": 0.1}}),
        changed(costs=[]),
        lambda content: [content],
    ],
)
def test_what_is_not_believed(tmp_path: Path, change: Any) -> None:
    """Another format, another key (of equal digest), too old, from the future, no costs."""
    cost_cache.write(str(tmp_path), KEY, COSTS)
    file = Path(cost_cache.path_of(str(tmp_path), KEY))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert cost_cache.read(str(tmp_path), KEY) is None


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "ke', b"\xff\xfe"])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    file = Path(cost_cache.path_of(str(tmp_path), KEY))
    file.write_bytes(content)
    assert cost_cache.read(str(tmp_path), KEY) is None
    cost_cache.write(str(tmp_path), KEY, COSTS)
    assert cost_cache.read(str(tmp_path), KEY) is not None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "/proc/mpistrat"):
        cost_cache.write(folder, KEY, COSTS)
        assert cost_cache.read(folder, KEY) is None


def test_old_files_are_removed(tmp_path: Path) -> None:
    """And only ours."""
    long_ago = time.time() - cost_cache.SECONDS_TO_LIVE - 60
    for name in ("costs-0123.json", "costs-xyz.part", "somebody's.json"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (long_ago, long_ago))
    cost_cache.write(str(tmp_path), KEY, COSTS)
    kept = {Path(cost_cache.path_of(str(tmp_path), KEY)).name, "somebody's.json"}
    assert set(os.listdir(tmp_path)) == kept


def test_many_jobs_at_once(tmp_path: Path) -> None:
    """A reader finds all of one of them, once there is any."""
    costs = [{"memory": Cost(i * 1e-6, i * 1e-10, 0.1)} for i in range(1, 5)]
    stop = threading.Event()

    def write(entry: dict[str, Cost]) -> None:
        while not stop.is_set():
            cost_cache.write(str(tmp_path), KEY, entry)

    writers = [threading.Thread(target=write, args=(entry,)) for entry in costs]
    for writer in writers:
        writer.start()
    try:
        while not os.path.exists(cost_cache.path_of(str(tmp_path), KEY)):
            time.sleep(0.001)  # 200 looks take less time than a thread that does not get the core
        found = [cost_cache.read(str(tmp_path), KEY) for _ in range(200)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(read is not None and read[0] in costs for read in found)
    assert len(os.listdir(tmp_path)) == 1
