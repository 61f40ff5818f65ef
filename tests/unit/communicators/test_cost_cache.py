"""What a file keeps of jobs' measurements: what is read is what was written, or nothing."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpistrat.communicators.costs import cache as cost_cache
from mpistrat.communicators.costs.observations import MOST, Observation
from mpistrat.liveness.deadlines import COSTS_LIVE

KEY: dict[str, Any] = {"mpi": "MPICH 5.0.2", "cpus": [("a processor", 4, 2)]}
DAY = 86400.0


def observation(days_ago: float = 0.0, distance: float = 3e-6) -> Observation:
    times = {"memory": [1e-5, 2e-5], "MPI": [1e-5, 4e-5]}
    return Observation(time.time() - days_ago * DAY, distance, times)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = str(tmp_path / "not" / "there yet")
    assert cost_cache.read(folder, KEY) == []
    written = [observation(1), observation()]
    for each in written[::-1]:
        cost_cache.add(folder, KEY, each)
    assert cost_cache.read(folder, KEY) == written
    assert cost_cache.read(folder, {**KEY, "mpi": "Open MPI v5.0.11"}) == []
    assert len(os.listdir(folder)) == 1


def test_the_newest_of_each_distance_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are too old fall out one by one."""
    far = [observation(days, 6e-6) for days in (6, 5)]
    near = [observation(days) for days in range(6, -1, -1)]
    for each in (*far, *near):
        cost_cache.add(str(tmp_path), KEY, each)
    kept = [*far, *near[-MOST:]]
    assert cost_cache.read(str(tmp_path), KEY) == kept
    now = time.time()
    for days, fallen in ((1.5, 1), (2.5, 2), (3.5, 3), (6.5, 6), (7.5, 7)):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * DAY)
        assert cost_cache.read(str(tmp_path), KEY) == kept[fallen:]


def test_a_lost_race_loses_one_observation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two jobs that have read the same and write."""
    first, mine, theirs = observation(2), observation(1), observation()
    cost_cache.add(str(tmp_path), KEY, first)
    replace = os.replace

    def meanwhile(*paths: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        cost_cache.add(str(tmp_path), KEY, theirs)
        replace(*paths)

    monkeypatch.setattr(os, "replace", meanwhile)
    cost_cache.add(str(tmp_path), KEY, mine)
    assert cost_cache.read(str(tmp_path), KEY) == [first, mine]


def changed(**fields: Any) -> Any:
    return lambda content: {**content, **fields}


def with_times(*times: float) -> Any:
    return changed(observations=[{"when": time.time(), "distance": 0, "seconds": {"MPI": times}}])


@pytest.mark.parametrize(
    "change",
    [
        changed(format=cost_cache.FORMAT + 1),
        changed(key={"another": 1}),
        changed(observations=[{**vars(observation()), "when": 0}]),
        changed(observations=[{**vars(observation()), "when": time.time() + DAY}]),
        changed(observations=[{**vars(observation()), "when": "yesterday"}]),
        changed(observations=[{"when": time.time()}]),
        with_times(1e-5, float("nan")),
        with_times(1e-5, -1e-5),
        changed(observations={}),
        lambda content: [content],
    ],
)
def test_what_is_not_believed(tmp_path: Path, change: Any) -> None:
    """Another format, another key (of equal digest), too old, from the future, no times."""
    cost_cache.add(str(tmp_path), KEY, observation())
    file = Path(cost_cache.path_of(str(tmp_path), KEY))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert cost_cache.read(str(tmp_path), KEY) == []


@pytest.mark.parametrize("content", [b"", b'{"format": 1, "ke', b"\xff\xfe"])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    file = Path(cost_cache.path_of(str(tmp_path), KEY))
    file.write_bytes(content)
    assert cost_cache.read(str(tmp_path), KEY) == []
    cost_cache.add(str(tmp_path), KEY, observation())
    assert cost_cache.read(str(tmp_path), KEY) != []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "/proc/mpistrat"):
        cost_cache.add(folder, KEY, observation())
        assert cost_cache.read(folder, KEY) == []


def test_old_files_are_removed(tmp_path: Path) -> None:
    """And only ours."""
    long_ago = time.time() - COSTS_LIVE - 60
    for name in ("costs-0123.json", "costs-xyz.part", "somebody's.json"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (long_ago, long_ago))
    cost_cache.add(str(tmp_path), KEY, observation())
    kept = {Path(cost_cache.path_of(str(tmp_path), KEY)).name, "somebody's.json"}
    assert set(os.listdir(tmp_path)) == kept


def test_many_jobs_at_once(tmp_path: Path) -> None:
    """A reader finds whole observations, once there is any."""
    stop = threading.Event()
    written = [observation(days) for days in range(4)]

    def write(mine: Observation) -> None:
        while not stop.is_set():
            cost_cache.add(str(tmp_path), KEY, mine)

    writers = [threading.Thread(target=write, args=(each,)) for each in written]
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
    assert all(read and all(each in written for each in read) for read in found)
    assert len(os.listdir(tmp_path)) == 1
