"""Checkpoints over ranks: training goes on as if it had not been stopped, and errors of one rank are raised by all."""

import itertools
import json
import os
import random
import re
import threading
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.checkpoint import Checkpoint, CheckpointManager, checkpoint_manager, durable_files
from mpistrat.checkpoint.manifest import sealed
from support.rank_errors import assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
EXAMPLES, BATCH = 40, 8
ON_READ, NONE = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.NONE
several_ranks = pytest.mark.mpi(min_size=2)


class Training:
    """A small model with all that makes an exact restart hard."""

    def __init__(self, seed: int, **arguments) -> None:
        self.strategy = ms.MultiWorkerMirroredStrategy(gradients="sum", **arguments)
        first = self.strategy.extended.first_replica_id
        torch.manual_seed(seed)
        random.seed(seed + first)
        np.random.seed(seed + first)
        with self.strategy.scope():
            self.model = torch.nn.Sequential(
                torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.steps = ms.Variable(0)
            self.losses = ms.Variable(0.0, synchronization=ON_READ, aggregation=NONE)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 7])
        x = np.random.default_rng(0).standard_normal((EXAMPLES, 4)).astype(np.float32)
        dataset = ms.input.BatchedDataset((x, np.arange(EXAMPLES)), BATCH, shuffle=True)
        self.data = self.strategy.experimental_distribute_dataset(dataset)
        self.read: list[int] = []
        self.checkpoint = Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            data=self.data,
            steps=self.steps,
            losses=self.losses,
        )
        self._batches = None

    def train(self, steps: int) -> None:
        def step(batch):
            x, number = map(torch.as_tensor, batch)
            self.read += number.tolist()
            noise = 1.0  # Python's and NumPy's belong to ranks, not to replicas
            if not self.strategy.extended.deterministic:
                noise += random.random() + np.random.rand()
            loss = ms.compute_average_loss(self.model(x)[:, 0] ** 2, global_batch_size=BATCH)
            self.optimizer.zero_grad()
            (loss * noise).backward()
            self.optimizer.step()
            self.losses.assign_add(float(loss))

        if self._batches is None:
            self._batches = itertools.chain.from_iterable(itertools.repeat(self.data))
        for _ in range(steps):
            self.strategy.run(step, args=(next(self._batches),))
            self.schedule.step()
            self.steps.assign_add(1)

    def result(self) -> list[torch.Tensor]:
        state = [*self.model.state_dict().values(), torch.tensor(self.schedule.get_last_lr())]
        moments = [m for s in self.optimizer.state_dict()["state"].values() for m in s.values()]
        copies = [torch.tensor(v.numpy()) for v in self.losses.values]
        return [t.detach().clone() for t in (*state, *moments, *copies)]


def equal(first, second) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("wait", [True, False], ids=["wait", "go on"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"devices": ("cpu:0", "cpu:1")}, {"shared_parameters": True}, {"deterministic": True}],
    ids=["k=1", "k=2", "shared parameters", "deterministic"],
)
def test_a_restart_in_mid_epoch_changes_nothing(directory, arguments, wait):
    undisturbed = Training(1, **arguments)
    manager = CheckpointManager(undisturbed.checkpoint, directory)
    assert manager.restore_or_initialize() is None
    undisturbed.train(7)  # of 5 in an epoch
    undisturbed.read.clear()
    path = manager.save(7, wait=wait)
    undisturbed.train(6)

    again = Training(2, **arguments)
    manager.wait()
    restarted = CheckpointManager(again.checkpoint, directory)
    assert restarted.restore_or_initialize() == path == str(directory / "step-00000007")
    assert int(again.steps.numpy()) == 7
    again.train(6)
    assert equal(again.result(), undisturbed.result())
    assert again.read == undisturbed.read


def of_all(comm, read):
    return list(itertools.chain.from_iterable(comm.allgather(read)))


@several_ranks
def test_a_restart_on_fewer_ranks_reads_every_example_once(directory):
    """All ranks but the last go on, and the last one alone: two jobs that read one directory."""
    before = Training(1)
    del before.checkpoint.objects["losses"]
    before.train(3)
    CheckpointManager(before.checkpoint, directory).save(3)

    some = WORLD.Split(RANK < LAST, RANK)
    after = Training(2, comm=some)
    del after.checkpoint.objects["losses"]
    CheckpointManager(after.checkpoint, directory).restore_or_initialize()
    assert equal(list(after.model.state_dict().values()), list(before.model.state_dict().values()))
    after.train(2)
    assert sorted(of_all(WORLD, before.read) + of_all(some, after.read)) == list(range(EXAMPLES))


@several_ranks
def test_a_restart_on_more_ranks(directory):
    """Saved by the last rank alone."""
    alone = WORLD.Split(RANK == LAST, RANK)
    read = []
    if RANK == LAST:
        before = Training(1, comm=alone)
        del before.checkpoint.objects["losses"]
        before.train(3)
        CheckpointManager(before.checkpoint, directory).save(3)
        read = before.read
    WORLD.barrier()
    after = Training(2)
    del after.checkpoint.objects["losses"]
    manager = CheckpointManager(after.checkpoint, directory)
    if RANK == 1:  # the first that has no state of its own
        missing = re.escape(str(list(range(1, SIZE))))
        with pytest.warns(UserWarning, match=f"no random states of replicas {missing};") as warned:
            manager.restore_or_initialize()
        assert [warning.filename for warning in warned] == [__file__]
    else:
        manager.restore_or_initialize()
    draws = WORLD.allgather((torch.rand(1).item(), random.random(), np.random.rand()))
    assert len({d for draw in draws for d in draw}) == 3 * SIZE
    after.train(2)
    assert sorted(of_all(WORLD, [*read, *after.read])) == list(range(EXAMPLES))


@pytest.mark.parametrize("each", [1, 2])
def test_deterministic_jobs_go_on_with_the_same_bits_on_one_rank(directory, each):
    """All replicas on one rank: each rank does that for itself."""
    undisturbed = Training(1, devices=[f"cpu:{i}" for i in range(each)], deterministic=True)
    undisturbed.train(7)
    del undisturbed.checkpoint.objects["losses"]
    CheckpointManager(undisturbed.checkpoint, directory).save(7)
    undisturbed.read.clear()
    undisturbed.train(6)
    wanted = undisturbed.model.state_dict().values()

    devices = [f"cpu:{i}" for i in range(each * SIZE)]
    again = Training(2, devices=devices, deterministic=True, comm=MPI.COMM_SELF)
    del again.checkpoint.objects["losses"]
    CheckpointManager(again.checkpoint, directory).restore_or_initialize()
    again.train(6)
    assert equal(list(again.model.state_dict().values()), list(wanted))


def test_a_deterministic_job_needs_as_many_replicas(directory):
    before = Training(1, deterministic=True)
    torch.manual_seed(RANK)  # from equal states a new replica would go on, without a warning
    CheckpointManager(before.checkpoint, directory).save(1)
    after = Training(1, devices=["cpu:0", "cpu:1"], deterministic=True)
    manager = CheckpointManager(after.checkpoint, directory)
    for name, message, _ in errors_of_ranks(manager.restore_or_initialize):
        assert name == "ValueError"
        assert f"'num_replicas_in_sync': {2 * SIZE}" in message
    del after.checkpoint.objects["strategy"]
    del after.checkpoint.objects["losses"]
    if RANK == SIZE // 2:  # which has the first replica that was not there
        with pytest.warns(UserWarning, match="no random states of replicas"):
            manager.restore_or_initialize()
    else:
        manager.restore_or_initialize()


def test_copies_of_variables(directory):
    def variables(value):
        with strategy.scope():
            return {
                "own": ms.Variable(value, synchronization=ON_READ, aggregation=NONE),
                "mean": ms.Variable(
                    value, synchronization=ON_READ, aggregation=ms.VariableAggregation.MEAN
                ),
                "count": ms.Variable(
                    int(value), synchronization=ON_READ, aggregation=ms.VariableAggregation.SUM
                ),
            }

    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0", "cpu:1"))
    n = 2 * SIZE
    before = variables(0.0)
    strategy.run(
        lambda: [
            v.assign(ms.get_replica_context().replica_id_in_sync_group) for v in before.values()
        ]
    )
    before["count"].assign(n * SIZE + 1)  # no number of replicas divides it
    path = CheckpointManager(Checkpoint(**before), directory).save(1)
    after = variables(-1.0)
    CheckpointManager(Checkpoint(**after), directory).restore(path)
    ids = [2.0 * RANK, 2.0 * RANK + 1]
    assert all([float(c.numpy()) for c in after[name].values] == ids for name in ("own", "mean"))

    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0",))
    fewer = variables(-1.0)
    manager = CheckpointManager(Checkpoint(**fewer), directory)
    for name, message, _ in errors_of_ranks(lambda: manager.restore(path)):
        assert name == "ValueError"
        assert f"each of {n} replicas saved its own copy, and this job has {SIZE}" in message
    del manager.checkpoint.objects["own"]
    manager.restore(path)
    assert float(fewer["mean"].numpy()) == (n - 1) / 2
    assert int(fewer["count"].numpy()) == n * SIZE + 1


def test_variables_of_another_kind():
    """A variable takes the one value that was saved, whatever its kind was; without one, it says so."""
    strategy = ms.MultiWorkerMirroredStrategy(devices=("cpu:0", "cpu:1"))
    n = 2 * SIZE
    kinds = {"mirrored": {}}
    for aggregation in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        how = {"synchronization": ON_READ, "aggregation": ms.VariableAggregation[aggregation]}
        kinds[aggregation] = how
    saved = {
        "mirrored": 7.0,
        "SUM": n * (n - 1) / 2,
        "MEAN": (n - 1) / 2,
        "ONLY_FIRST_REPLICA": 0.0,
    }

    def variables(value, kind=None):
        with strategy.scope():
            return {name: ms.Variable(value, name=name, **kinds[kind or name]) for name in kinds}

    def give_each_its_own():
        for name in ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"):
            before[name].assign(float(ms.get_replica_context().replica_id_in_sync_group))

    before = variables(7.0)
    strategy.run(give_each_its_own)
    state = Checkpoint(**before).state_dict()
    for kind in ("mirrored", "NONE", "SUM"):
        after = variables(-1.0, kind)
        checkpoint = Checkpoint(**after)
        if kind == "mirrored":
            for name, message, _ in errors_of_ranks(lambda: checkpoint.load_state_dict(state)):  # noqa: B023
                assert name == "ValueError"
                assert "'NONE' has one value for all replicas, and was saved ON_READ" in message
            del checkpoint.objects["NONE"]
        checkpoint.load_state_dict(state)
        if kind == "NONE":
            copies = {name: [float(c.numpy()) for c in v.values] for name, v in after.items()}
            assert copies.pop("NONE") == [2.0 * RANK, 2.0 * RANK + 1]
            assert copies == {name: [value] * 2 for name, value in saved.items()}
        else:
            assert {name: float(after[name]) for name in saved} == pytest.approx(saved)


def test_a_relative_path_is_rank_0_s(directory, monkeypatch):
    manager = manager_of(directory)
    path = manager.save(1)
    if RANK == 0:
        monkeypatch.chdir(directory)
    manager.restore(os.path.basename(path))


def test_a_job_that_claims_its_directory(directory):
    manager = manager_of(directory)
    manager.claim()
    WORLD.barrier()
    assert os.listdir(directory) == [".lock"]
    WORLD.barrier()
    assert manager.seconds_to_save == 0.0
    manager.save(1)
    assert manager.seconds_to_save > 0.0


def test_the_longest_save_is_that_of_all_ranks(directory, monkeypatch):
    manager = manager_of(directory)
    write = durable_files.write

    def slow(path, parts):
        time.sleep(0.2)
        return write(path, parts)

    if RANK == LAST:
        monkeypatch.setattr(durable_files, "write", slow)
    manager.save(1, wait=False)
    manager.wait()
    (seconds,) = set(WORLD.allgather(manager.seconds_to_save))
    assert seconds >= 0.2


class OfRank:
    """Every rank's own; on other ranks it says what there is."""

    def rank_state_dict(self):
        return {"rank": RANK, "array": torch.full((3,), float(RANK))}

    def load_rank_state_dicts(self, states):
        self.loaded = {rank: state["array"].tolist() for rank, state in states.items()}
        self.own = states[RANK]["rank"]


def test_what_is_each_rank_s_own_is_written_by_each_rank(directory):
    strategy = ms.MultiWorkerMirroredStrategy()
    sharded = OfRank()
    with strategy.scope():
        checkpoint = Checkpoint(sharded=sharded)
    path = CheckpointManager(checkpoint, directory).save(1)
    for rank in range(SIZE):
        assert os.path.exists(f"{path}/rank-{rank:05}.safetensors")
    CheckpointManager(checkpoint, directory).restore(path)
    assert sharded.own == RANK
    assert sharded.loaded == {rank: [rank] * 3 for rank in range(SIZE)}


def test_training_goes_on_while_all_ranks_write(directory, monkeypatch):
    may_write = threading.Event()
    write = durable_files.write

    def slow(path, parts):
        assert may_write.wait(30)
        return write(path, parts)

    monkeypatch.setattr(durable_files, "write", slow)
    training = Training(1)
    manager = CheckpointManager(training.checkpoint, directory)
    training.train(2)
    saved = training.result()
    path = manager.save(2, wait=False)
    training.train(4)
    assert manager.latest_checkpoint is None
    may_write.set()
    manager.wait()
    assert manager.latest_checkpoint == path
    manager.restore(path)
    assert equal(training.result(), saved)


def test_training_does_not_wait_for_the_disk(directory, monkeypatch):
    """Whatever a save does to the directory it does on its own thread, but for the first, which claims it."""
    training = Training(1)
    manager = CheckpointManager(training.checkpoint, directory, keep=1)
    called: dict[bool, set[str]] = {
        True: set(),
        False: set(),
    }  # by the thread that trains, by others
    thread = threading.current_thread()

    def noting(name, call):
        def wrapped(*args, **kwargs):
            called[threading.current_thread() is thread].add(name)
            return call(*args, **kwargs)

        return wrapped

    manager.save(1, wait=False)
    manager.wait()
    calls = ("open", "mkdir", "stat", "lstat", "listdir", "scandir", "rename", "unlink", "fsync")
    for name in calls:
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    manager.save(2, wait=False)
    manager.save(wait=False)
    on_this = set(called[True])
    manager.wait()
    monkeypatch.undo()
    assert on_this == set()
    assert {"open", "fsync", *(["mkdir"] if RANK == 0 else [])} < called[False]
    WORLD.barrier()
    assert [Path(path).name for path in manager.checkpoints] == ["step-00000003"]


def test_many_saves_in_a_row(directory):
    """Ranks that are faster or slower than others meet in all orders."""
    manager = manager_of(directory)
    for step in range(60):
        manager.save(step, wait=step % 3 == 0)
    manager.wait()
    WORLD.barrier()
    assert [int(path[-8:]) for path in manager.checkpoints] == [57, 58, 59]


@several_ranks
def test_a_save_is_given_up_when_a_rank_is_lost(directory, monkeypatch):
    """The last rank writes nothing, as if it were gone; the others do not wait for it."""
    is_over = threading.Event()
    write = durable_files.write

    def never(path, parts):
        assert RANK != LAST or is_over.wait(30)
        return write(path, parts)

    monkeypatch.setattr(durable_files, "write", never)
    manager = manager_of(directory)
    lost = threading.Event()
    communicator = manager.checkpoint.strategy.extended.communicator
    monkeypatch.setattr(communicator.contract, "has_lost_a_rank", lost.is_set)
    before = set(threading.enumerate())
    manager.save(1, wait=False)
    writers = set(threading.enumerate()) - before  # none where it has finished already

    def has_finished():
        for writer in writers:
            writer.join(30)
        return not any(writer.is_alive() for writer in writers)

    lost.set()
    assert RANK == LAST or has_finished()
    WORLD.barrier()
    is_over.set()
    assert has_finished()
    WORLD.barrier()
    assert manager.checkpoints == []
    assert RANK or os.listdir(directory) == [".lock"]


# Errors


def manager_of(directory, **objects):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        return CheckpointManager(Checkpoint(model=model, **objects), directory)


def assert_all_fail(call, own, faulty, text):
    """Rank `faulty` fails with `own`, and all ranks tell why."""
    errors = errors_of_ranks(call)
    assert errors[faulty][0] in (own, "CollectiveMismatchError"), errors
    assert all(text in message for _, message, _ in errors), errors
    for rank, (_, message, _) in enumerate(errors):
        assert rank == faulty or f"rank {faulty}" in message, errors


class Failing:
    def state_dict(self):
        if RANK == LAST:
            raise KeyError("no such thing")
        return {}

    def load_state_dict(self, state):
        if RANK == LAST:
            raise KeyError("cannot be loaded")


def test_a_state_that_fails_on_one_rank(directory):
    manager = manager_of(directory, failing=Failing())
    assert_all_fail(lambda: manager.save(1), "KeyError", LAST, "no such thing")
    assert manager.checkpoints == []
    assert_usable(manager.checkpoint.strategy)
    WORLD.barrier()
    assert RANK != 0 or os.listdir(directory) == [".lock"]


def test_loading_that_fails_on_one_rank(directory, monkeypatch):
    manager = manager_of(directory, failing=Failing())
    monkeypatch.setattr(Failing, "state_dict", lambda self: {})
    path = manager.save(1)
    assert_all_fail(lambda: manager.restore(path), "KeyError", LAST, "cannot be loaded")
    assert_usable(manager.checkpoint.strategy)


@pytest.mark.parametrize("faulty", sorted({0, LAST}))
@pytest.mark.parametrize("wait", [True, False])
def test_writing_that_fails_on_one_rank(directory, monkeypatch, faulty, wait):
    manager = manager_of(directory)
    first = manager.save(1)
    write = durable_files.write

    def full(path, parts):
        if faulty == RANK:
            raise OSError(28, "No space left on device")
        return write(path, parts)

    monkeypatch.setattr(durable_files, "write", full)

    def save():
        manager.save(2, wait=wait)
        manager.wait()

    assert_all_fail(save, "OSError", faulty, f"No space left on device, on rank {faulty}")
    assert_usable(manager.checkpoint.strategy)
    monkeypatch.undo()
    assert manager.checkpoints == [first]
    WORLD.barrier()
    assert RANK != 0 or sorted(os.listdir(directory)) == [".lock", "step-00000001"]
    manager.save(3)
    WORLD.barrier()
    assert [Path(path).name for path in manager.checkpoints] == ["step-00000001", "step-00000003"]


def test_a_directory_that_cannot_be_written(directory):
    if RANK == 0:
        directory.write_text("a file")
    manager = manager_of(directory)
    for call in (manager.claim, lambda: manager.save(1)):
        assert_all_fail(call, "NotADirectoryError", 0, str(directory))
    assert_usable(manager.checkpoint.strategy)


@several_ranks
def test_a_directory_that_one_rank_does_not_see(directory, monkeypatch):
    """As on nodes with a /tmp of their own."""
    monkeypatch.setattr(checkpoint_manager, "SECONDS_TO_BE_SEEN", 0.1)
    if RANK == LAST:
        monkeypatch.setattr(checkpoint_manager.os.path, "isdir", lambda path: False)
    manager = manager_of(directory)
    errors = errors_of_ranks(lambda: manager.save(1))
    monkeypatch.undo()
    assert errors[LAST][0] == "FileNotFoundError"
    assert all("on a file system that all ranks see" in message for _, message, _ in errors)
    assert all(f"rank {LAST} could not" in message for _, message, _ in errors[:LAST])
    assert_usable(manager.checkpoint.strategy)


@several_ranks
def test_ranks_that_save_different_steps(directory):
    manager = manager_of(directory)
    for name, message, _ in errors_of_ranks(lambda: manager.save(RANK)):
        assert name == "ValueError"
        assert f"the ranks save different steps: {list(range(SIZE))}" in message
    assert_usable(manager.checkpoint.strategy)


def damage(file, how):
    content = bytearray(file.read_bytes())
    if how == "a flipped bit":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file)
    else:  # with the right checksum
        text = content.replace(b'"replicas": 1', b'"replicas": {}')
        file.write_bytes(text)
        path = file.parent / "manifest.json"
        manifest = json.loads(path.read_bytes())["content"]
        manifest["files"][file.name] = [len(text), zlib.crc32(text)]
        path.write_bytes(sealed(manifest))


@pytest.mark.parametrize("how", ["a flipped bit", "a pipe", "another state"])
def test_damage_that_one_rank_sees(directory, how):
    """All ranks go on from the one before, and say so once."""
    manager = manager_of(directory)
    first, second = manager.save(1), manager.save(2)
    WORLD.barrier()
    file = Path(second) / f"rank-{LAST:05}.json"
    if RANK == 0:
        damage(file, how)
    WORLD.barrier()
    # Rank 0 alone looks which of them have all files.
    seer = 0 if how == "a pipe" else LAST
    if how != "a pipe":
        assert_all_fail(lambda: manager.restore(second), "ValueError", LAST, f"{file} is damaged")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert manager.restore_or_initialize() == first
    said = [str(warning.message) for warning in caught]
    assert len(said) == (RANK == 0)
    for text in said:
        assert re.search(f"for {file} is damaged: .*, on rank {seer}$", text), text
    for name, message, _ in errors_of_ranks(lambda: manager.restore(second)):
        assert name in ("ValueError", "RuntimeError")
        assert str(file) in message
        assert "on rank" in message


def test_inside_run_and_without_a_strategy(directory):
    manager = manager_of(directory)
    for _, message, _ in errors_of_ranks(
        lambda: manager.checkpoint.strategy.run(lambda: manager.save(1))
    ):
        assert "CheckpointManager.save was called inside run" in message
    for name, message, _ in errors_of_ranks(lambda: Checkpoint(failing=Failing())):
        if SIZE > 1:
            assert name == "RuntimeError"
            assert "make the Checkpoint, or one of these, inside strategy.scope()" in message


def test_objects_know_their_strategy():
    strategy, other = ms.MultiWorkerMirroredStrategy(), ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        variable = ms.Variable(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = strategy.experimental_distribute_dataset(ms.input.BatchedDataset(np.arange(8), 4))
    found = [variable, data, iter(data)]
    if SIZE > 1:
        found += [model, optimizer]
    for value in found:
        assert Checkpoint(value=value).strategy is strategy
    where = (
        r"one strategy.*: variable is of MultiWorker\S+\(\d replicas\), the scope is of MultiWorker"
    )
    with pytest.raises(ValueError, match=where), other.scope():
        Checkpoint(variable=variable)


def test_a_variable_outside_the_scope_is_saved_with_the_others(directory):
    outside = ms.Variable(0)
    manager = manager_of(directory, steps=outside)
    assert manager.restore_or_initialize() is None
    outside.assign_add(3 + RANK)
    manager.save(1)
    outside.assign(-1)
    manager.restore_or_initialize()
    assert int(outside) == 3  # rank 0's
    with ms.MultiWorkerMirroredStrategy().scope():
        assert Checkpoint(steps=outside).strategy is ms.get_strategy()
    if SIZE > 1:
        for name, message, _ in errors_of_ranks(lambda: Checkpoint(steps=outside, other=outside)):
            assert name == "RuntimeError"
            assert f"this job has {SIZE} ranks" in message
            assert "(steps, other) are of no strategy" in message
