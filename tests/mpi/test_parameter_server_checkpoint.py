"""Checkpoints of variables on servers: whole, of one time, and for any number of servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.experimental.partitioners import FixedShardsPartitioner

COMM = MPI.COMM_WORLD
ROWS = 11

Body = Callable[[Any], Any]


def job(coordinated: bool, servers: int, body: Body) -> Any:
    """Run `body(strategy)` on the ranks that go on; None on the others."""
    make = ms.ParameterServerStrategy if coordinated else ms.compat.v1.ParameterServerStrategy
    try:
        strategy = make(num_ps=servers, variable_partitioner=FixedShardsPartitioner(3))
    except SystemExit:
        return None
    try:
        return body(strategy)
    finally:
        strategy.extended.job.done()


def variables(strategy: Any, start: float) -> Any:
    with strategy.scope():
        count = ms.Variable(start, name="count")
        rows = ms.Variable(np.full((ROWS, 2), start, "float32"), name="rows")
        checkpoint = ms.checkpoint.Checkpoint(count=count, rows=rows)
    return count, rows, checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(COMM.bcast(str(tmp_path))) / "checkpoints"


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("coordinated", [False, True], ids=["between_graph", "coordinated"])
def test_restored_onto_another_number_of_servers(folder: Path, coordinated: bool) -> None:
    def save(strategy: Any) -> None:
        count, rows, checkpoint = variables(strategy, 7.0)
        if strategy.extended.makes_variables:
            count.assign(3.0)
            rows.assign(np.arange(2.0 * ROWS, dtype="float32").reshape(ROWS, 2))
        ms.checkpoint.CheckpointManager(checkpoint, folder).save(5)

    def load(strategy: Any) -> tuple[str, float, Any]:
        count, rows, checkpoint = variables(strategy, 0.0)
        path = ms.checkpoint.CheckpointManager(checkpoint, folder).restore_or_initialize()
        return str(path), float(count.numpy()), rows.numpy()

    job(coordinated, 1, save)
    most = COMM.size - (2 if coordinated else 1)
    for servers in {1, most}:
        loaded = job(coordinated, servers, load)
        if loaded is not None:
            path, count, rows = loaded
            assert path.endswith("5")
            assert count == 3.0
            assert rows.ravel().tolist() == list(range(2 * ROWS))


@pytest.mark.mpi(min_size=4)
def test_a_push_to_several_servers_is_saved_whole() -> None:
    def body(strategy: Any) -> None:
        _, rows, _ = variables(strategy, 0.0)
        extended = strategy.extended
        end = time.monotonic() + 1.0
        if not extended.makes_variables:
            while time.monotonic() < end:
                rows.assign_add(np.ones((ROWS, 2), "float32"))
            return
        while time.monotonic() < end:
            with extended.checkpoints.unchanging():
                seen = rows.numpy()
            assert seen.min() == seen.max()

    job(False, 2, body)


@pytest.mark.mpi(min_size=3)
def test_a_coordinator_saves_between_functions() -> None:
    def body(strategy: Any) -> None:
        count, rows, _ = variables(strategy, 0.0)
        coordinator = ms.coordinator.ClusterCoordinator(strategy)

        def add() -> None:
            count.assign_add(1.0)
            time.sleep(0.002)
            rows.assign_add(np.ones((ROWS, 2), "float32"))

        results = [coordinator.schedule(add) for _ in range(100)]
        reads = 0
        while not coordinator.done():
            with strategy.extended.checkpoints.unchanging():
                assert count.numpy() == rows.numpy().min() == rows.numpy().max()
            reads += 1
        coordinator.join()
        assert reads
        assert count.numpy() == len(results)

    job(True, 1, body)


@pytest.mark.mpi(min_size=3)
def test_other_workers_wait_for_the_one_that_restores(folder: Path) -> None:
    def body(strategy: Any) -> float:
        count, _, checkpoint = variables(strategy, 0.0)
        manager = ms.checkpoint.CheckpointManager(checkpoint, folder)
        assert manager.restore_or_initialize() is None
        if strategy.extended.makes_variables:
            count.assign(4.0)
            path = manager.save()
            count.assign(5.0)
            time.sleep(0.2)
        else:
            path = str(folder / "step-00000001")
        manager.restore(path)
        return float(count.numpy())

    result = job(False, 1, body)
    assert result in (4.0, None)


@pytest.mark.mpi(min_size=3)
def test_a_coordinator_goes_on_after_a_checkpoint_that_failed() -> None:
    def body(strategy: Any) -> None:
        count, _, _ = variables(strategy, 0.0)
        coordinator = ms.coordinator.ClusterCoordinator(strategy)
        for _ in range(50):
            coordinator.schedule(lambda: time.sleep(0.001) or count.assign_add(1.0))
        with pytest.raises(OSError, match="no room"), strategy.extended.checkpoints.unchanging():
            raise OSError("no room")
        coordinator.join()
        assert count.numpy() == 50

    job(True, 1, body)


@pytest.mark.mpi(min_size=3)
def test_a_restore_that_fails_fails_for_all_workers_and_they_go_on(folder: Path) -> None:
    class Moody:
        """A stateful object whose state worker 0 cannot load at first, and then only after a while."""

        def __init__(self, leads: bool) -> None:
            self.loads = 0 if leads else 1

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.loads += 1
            if self.loads == 1:
                raise KeyboardInterrupt
            time.sleep(1)

    def body(strategy: Any) -> None:
        leads = strategy.extended.makes_variables
        count, rows, _ = variables(strategy, 0.0)
        checkpoint = ms.checkpoint.Checkpoint(count=count, rows=rows, moody=Moody(leads))
        manager = ms.checkpoint.CheckpointManager(checkpoint, folder)
        who = "" if leads else r"worker 0 \(rank \d\) has not restored: "
        missing = str(folder / "step-00000009")
        rpc = strategy.extended.job.rpc
        limit = rpc.stall_seconds
        if not leads:
            rpc.stall_seconds = 0.01  # of one who follows, the others' pace is no stall
        for path, error in ((missing, (ValueError, OSError)), (None, TypeError)):
            with pytest.raises(error, match=who):
                manager.restore(path)
        path = str(folder / "step-00000001")
        if leads:
            count.assign(4.0)
            manager.save(1)
        with pytest.raises(KeyboardInterrupt if leads else RuntimeError, match=who):
            manager.restore(path)
        manager.restore(path)
        if leads:
            for file in Path(path).iterdir():
                file.write_bytes(b"damaged")
        with pytest.raises(ValueError, match=r"(ValueError: |^)no checkpoint in .* can be read"):
            manager.restore_or_initialize()
        rpc.stall_seconds = limit
        assert count.numpy() == 4.0

    job(False, 1, body)
