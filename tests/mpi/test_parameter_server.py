"""Workers that train by themselves, with variables on servers: over pipes, and over MPI as between nodes."""

import contextlib
import functools
import gc
import itertools
import os
import time

import numpy as np
import pytest
import torch
from mpi4py import MPI

import mpistrat as ms
from mpistrat.compat.v1 import ParameterServerStrategy
from mpistrat.errors import CollectiveMismatchError
from mpistrat.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from mpistrat.parameter_server.job import job as job_module
from mpistrat.parameter_server.protocol.messages import inline
from mpistrat.parameter_server.protocol.tables import MappedTable
from mpistrat.parameter_server.rpc.channel import Channel
from support.open_files import descriptors, mapped_bytes
from support.parameter_servers.remote_jobs import strategy_on_servers, workers_of

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
NUM_PS = [n for n in (1, 2) if n < SIZE] or [1]
SUM, MEAN = ms.VariableAggregation.SUM, ms.VariableAggregation.MEAN
SECONDS_TO_HEAR = 30.0  # of what takes milliseconds
pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture(params=["pipes", "mpi"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How messages go: between nodes they have MPI alone, and no memory in common."""
    if request.param == "mpi":
        monkeypatch.setattr(job_module, "Channel", functools.partial(Channel, pipes=False))
    return request.param


def made(num_ps=1, **keywords):
    return strategy_on_servers(lambda: ParameterServerStrategy(num_ps=num_ps, **keywords))


def variable(strategy, value, **keywords):
    with strategy.scope():
        return ms.Variable(value, **keywords)


@pytest.mark.parametrize("num_ps", NUM_PS)
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_updates(way, num_ps, make) -> None:
    with made(num_ps) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        for shape in ((), (4,), (3, 2), (0, 2), (300, 100)):
            for dtype in ("float32", "int64", "complex64"):
                v = variable(strategy, make(np.ones(shape, dtype)))
                own = make(np.full(shape, workers.rank + 1, dtype))
                for _ in range(3):
                    strategy.run(lambda v=v, own=own: v.assign_add(own))
                workers.Barrier()
                total = workers.size * (workers.size + 1) // 2
                assert np.array_equal(v.numpy(), np.full(shape, 1 + 3 * total, dtype))
                assert (v.shape, v.numpy().dtype) == (shape, np.dtype(dtype))
                assert isinstance(v.read_value(), type(own))
                workers.Barrier()
                v.assign_sub(own)
                workers.Barrier()
                assert np.array_equal(v.numpy(), np.full(shape, 1 + 2 * total, dtype))


def test_dtypes(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        for dtype in ("bool", "uint8", "int8", "float16", "float64"):
            value = np.array([[1, 0], [1, 1]], dtype)
            v = variable(strategy, value)
            assert v.numpy().dtype == value.dtype
            assert np.array_equal(v.assign(value.T.copy()), value.T)
        for dtype in (torch.bfloat16, torch.float16, torch.bool):
            tensor = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
            v = variable(strategy, tensor)
            assert torch.equal(v.read_value(), tensor)
            assert v.dtype == dtype
        workers_of(strategy).Barrier()
        if strategy.extended.job.roles.task_id == 0:
            v = variable_of_bfloat16(strategy)


def variable_of_bfloat16(strategy):
    v = variable(strategy, torch.full((3,), 1.5, dtype=torch.bfloat16))
    v.assign_add(torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(v.read_value(), torch.full((3,), 2.5, dtype=torch.bfloat16))
    return v


@pytest.mark.parametrize(
    "method", ["add", "sub", "mul", "div", "min", "max", "update"], ids="scatter_{}".format
)
def test_rows(way, method) -> None:
    with made(variable_partitioner=FixedShardsPartitioner(3)) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        first = np.arange(1.0, 15).reshape(7, 2)
        v = variable(strategy, first)
        rows = ms.IndexedSlices(np.full((3, 2), 4.0), [6, 0, 3])
        if workers.rank == 0:
            getattr(v, f"scatter_{method}")(rows)
        workers.Barrier()
        ways = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
        ways |= {"min": np.minimum, "max": np.maximum, "update": lambda old, new: new}
        expected = first.copy()
        expected[[6, 0, 3]] = ways[method](expected[[6, 0, 3]], 4.0)
        assert np.array_equal(v.numpy(), expected)
        # 3, 2 and 2 rows in the shards, read in the order of the indices
        assert np.array_equal(v.sparse_read([6, 0, 3, 0]), expected[[6, 0, 3, 0]])
        assert np.array_equal(v[2:6], expected[2:6])
        assert np.array_equal(v[-1], expected[-1])
        assert v.sparse_read([]).shape == (0, 2)


@pytest.mark.parametrize("num_ps", NUM_PS)
def test_increments_of_all_workers_are_exact(way, num_ps) -> None:
    steps = 60
    with made(num_ps, variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        number = variable(strategy, 0)
        large = variable(strategy, np.zeros((50, 400)))
        rows = variable(strategy, np.zeros((9, 3)))

        def step() -> None:
            number.assign_add(1)
            large.assign_add(np.ones((50, 400)))
            rows.scatter_add(ms.IndexedSlices(np.ones((4, 3)), [8, 0, 8, 4]))

        for _ in range(steps):
            strategy.run(step)
        workers.Barrier()
        n = steps * workers.size
        assert number.numpy() == n
        assert (large.numpy() == n).all()
        assert rows.numpy()[:, 0].tolist() == [n, 0, 0, 0, n, 0, 0, 0, 2 * n]
        assert strategy.steps == {
            f"worker {i} (rank {rank})": steps
            for i, rank in enumerate(strategy.extended.job.trainers)
        }


def test_a_worker_reads_what_it_wrote_and_no_half_of_what_others_write(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        shared = variable(strategy, np.zeros(100_000, np.int64))
        own = [variable(strategy, np.zeros(5000)) for _ in range(workers.size)][workers.rank]
        for number in range(40):
            own.assign(np.full(5000, float(number)))
            assert (own.numpy() == number).all()
            shared.assign_add(np.ones(100_000, np.int64))
            value = shared.read_value()
            assert value.min() == value.max() > number
            kept = value.copy()
            shared.assign_add(np.ones(100_000, np.int64))
            assert np.array_equal(value, kept)  # what was read stays what it was


@pytest.mark.parametrize(
    ("partitioner", "rows"),
    [
        (FixedShardsPartitioner(2), [4, 3]),
        (FixedShardsPartitioner(99), [1] * 7),
        (MinSizePartitioner(16, max_shards=4), [2, 2, 2, 1]),
        (MaxSizePartitioner(3 * 16), [3, 2, 2]),
        (lambda shape, dtype: [1] * len(shape), []),
        (lambda shape, dtype: (3, 1), [3, 2, 2]),
    ],
    ids=["fixed", "as many as rows", "least size", "largest size", "whole", "a function"],
)
def test_partitioners(partitioner, rows) -> None:
    with made(NUM_PS[-1], variable_partitioner=partitioner) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        value = np.arange(28.0, dtype=np.float32).reshape(7, 4)
        v = variable(strategy, value, name="w")
        offsets = []

        def first(partition_shape, partition_offset):
            offsets.append((tuple(partition_shape), tuple(partition_offset)))
            return np.full(partition_shape, partition_offset[0], np.float32)

        other = variable(strategy, first, shape=(7, 4), dtype="float32")
        scalar = variable(strategy, 3.0)
        assert np.array_equal(v.numpy(), value)
        assert scalar.numpy() == 3
        ends = np.cumsum(rows or [7])
        assert np.array_equal(other.numpy()[:, 0], np.repeat(ends - (rows or [7]), rows or [7]))
        if workers.rank == 0:
            assert offsets == [
                ((n, 4), (end - n, 0)) for n, end in zip(rows or [7], ends, strict=True)
            ]
        if rows:
            assert [shard.shape[0] for shard in v.variables] == rows
            assert [shard.name for shard in v.variables] == [
                f"w/part_{i}" for i in range(len(rows))
            ]
            devices = {shard.device for shard in v.variables}
            assert len(devices) == min(NUM_PS[-1], len(rows))
        else:
            assert not hasattr(v, "variables")


@pytest.mark.parametrize(
    "nonsense", [None, 2, [], [0, 1], [-1, 1], [1, 2], [2, 0], [2.0, 1], [True, 1], "2", {2: 1}]
)
def test_a_partitioner_that_returns_nonsense(nonsense) -> None:
    with made(variable_partitioner=lambda shape, dtype: nonsense) as strategy:
        if strategy is None:
            return
        with pytest.raises(
            ValueError, match=r"variable_partitioner must give .* 'w' of shape \[4, 3\]"
        ):
            variable(strategy, np.zeros((4, 3)), name="w")
        assert variable(strategy, 2.0).numpy() == 2  # the servers live


def test_a_partitioner_that_raises_and_variables_without_rows() -> None:
    def partitioner(shape, dtype):
        if shape[0] == 5:
            raise KeyError("five")
        return [2, *[1] * (len(shape) - 1)]

    with made(variable_partitioner=partitioner) as strategy:
        if strategy is None:
            return
        with pytest.raises(KeyError, match="five"):
            variable(strategy, np.zeros(5))
        assert variable(strategy, np.zeros((0, 3))).numpy().shape == (0, 3)
        assert [v.shape for v in variable(strategy, np.zeros((1, 3))).variables] == [(1, 3)]


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("num_ps", NUM_PS)
def test_no_worker_is_further_ahead_than_allowed(way, k, num_ps) -> None:
    with made(num_ps, max_staleness=k) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        ahead = []

        def step() -> None:
            steps = list(strategy.steps.values())
            ahead.append(steps[workers.rank] - min(steps))
            if workers.rank == 1:
                time.sleep(0.005)

        for _ in range(25):
            strategy.run(step)
        assert max(ahead) <= k
        most = workers.allreduce(max(ahead), MPI.MAX)
        if workers.size > 1:
            assert most == k  # and it is used


@pytest.mark.mpi(min_size=3)
def test_a_worker_in_a_long_step_holds_nobody_back_where_there_is_no_bound(way) -> None:
    """It is in its step until the others have made twenty."""
    with made() as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        slow = workers.size - 1
        v = variable(strategy, np.zeros(2000))
        workers.Barrier()

        def step() -> None:
            v.read_value()
            v.assign_add(np.ones(2000))

        def long_step() -> None:
            step()
            limit = time.monotonic() + SECONDS_TO_HEAR
            for fast in range(slow):
                while not workers.iprobe(source=fast):
                    assert time.monotonic() < limit, f"worker {fast} is held back"
                    time.sleep(0.001)
                workers.recv(source=fast)

        if workers.rank == slow:
            strategy.run(long_step)
            assert (v.numpy() == 20 * slow + 1).all()
        else:
            for _ in range(20):
                strategy.run(step)
            steps = [*strategy.steps.values()]
            assert (steps[workers.rank], steps[slow]) == (20, 0)
            workers.send("twenty", slow)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("k", [0, 2])
def test_who_leaves_early_holds_nobody_back(way, k) -> None:
    with made(max_staleness=k) as strategy:
        if strategy is None:
            return
        count = variable(strategy, 0)
        steps = 3 if RANK == 0 else 20
        for _ in range(steps):
            strategy.run(lambda: count.assign_add(1))
        if RANK == 0:
            strategy.shutdown()
            for use in (count.numpy, lambda: count.assign_add(1), lambda: strategy.steps):
                with pytest.raises(RuntimeError, match="has left the parameter servers"):
                    use()
        else:
            assert next(iter(strategy.steps.values())) == 3


def test_arrays_that_are_written_all_the_time_are_read_by_the_server(monkeypatch) -> None:
    monkeypatch.setattr(MappedTable, "copy_to", lambda table, out: False)
    with made() as strategy:
        if strategy is None:
            return
        values = [np.arange(size, dtype="f4") for size in (0, 3, 100_000)]
        variables = [variable(strategy, value) for value in values]
        outs = [np.empty_like(value) for value in values]
        strategy.extended.job.client.pull_into(
            [(v.address, out) for v, out in zip(variables, outs, strict=True)]
        )
        for v, out, value in zip(variables, outs, values, strict=True):
            assert np.array_equal(out, value)
            assert np.array_equal(v.numpy(), value)


def test_a_program_can_ask_who_it_is() -> None:
    with made() as strategy:
        if strategy is not None:
            resolver = strategy.cluster_resolver
            assert (resolver.task_type, resolver.task_id) == ("worker", RANK)
            assert len(resolver.cluster_spec().as_dict()["worker"]) == SIZE - 1


def test_workers_with_different_bounds() -> None:
    make = functools.partial(ParameterServerStrategy, num_ps=1, max_staleness=RANK)
    with pytest.raises(CollectiveMismatchError, match=r"max_staleness=0.*max_staleness=1"):
        make()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "parts"])
def test_workers_that_make_other_variables(way, what) -> None:
    with made(variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        odd = workers.rank == workers.size - 1
        if what == "parts" and odd:
            strategy.extended.variables.partitioner = None
        first = np.zeros(
            5 if odd and what == "shape" else 4, "f4" if odd and what == "dtype" else "f8"
        )
        name = "b" if odd and what == "name" else "a"
        if not odd:
            v = variable(strategy, first, name=name)
        else:
            with pytest.raises(
                CollectiveMismatchError, match=r"makes variable .* was made"
            ) as caught:
                variable(strategy, first, name=name)
            assert f"worker {workers.rank} (rank {RANK})" in str(caught.value)
        workers.Barrier()
        if not odd:
            v.assign_add(first + 1)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("when", ["whole", "second part", "on the server", "partitioner"])
def test_a_variable_that_one_worker_cannot_make_is_made_by_none(way, when, monkeypatch) -> None:
    """The others' errors name it, and wait for it no longer than it takes; the next variable is made."""
    with made(SIZE // 2, variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        makes = strategy.extended.makes_variables
        rpc = strategy.extended.job.rpc
        limit = rpc.stall_seconds
        if not makes:
            rpc.stall_seconds = 0.01  # it is not the server that the others wait for

        def whole():
            time.sleep(0.2)
            if makes and when == "whole":
                raise FileNotFoundError("no weights")
            return np.zeros((4, 3), "f4")

        def part(partition_shape, partition_offset):
            if makes and partition_offset[0]:
                time.sleep(0.2)
                raise FileNotFoundError("no weights")
            return np.zeros(partition_shape, "f4")

        def fails(*args):
            raise FileNotFoundError("no weights")

        with monkeypatch.context() as patch:
            if makes and when == "on the server":
                patch.setattr(strategy.extended.job.client, "create", fails)
            if makes and when == "partitioner":
                patch.setattr(strategy.extended.variables, "partitioner", fails)
            how = {"shape": (4, 3), "dtype": "float32"} if when == "second part" else {}
            who = "" if makes else r"worker 0 \(rank \d\) has not made variable 'w.*: FileNot.*: "
            with pytest.raises(FileNotFoundError, match=who + "no weights"):
                variable(strategy, part if when == "second part" else whole, name="w", **how)
        when = "the next"
        v = variable(strategy, whole, name="w")
        rpc.stall_seconds = limit
        v.assign_add(np.ones((4, 3), "f4"))  # no barrier: where this test fails, it ends
        assert (v.numpy() >= 1).all()


@pytest.mark.mpi(min_size=3)
def test_a_variable_that_a_worker_that_has_left_did_not_make(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        v = variable(strategy, 1.0)
        if strategy.extended.makes_variables:
            strategy.shutdown()
            return
        with pytest.raises(ms.errors.UnavailableError, match=r"worker 0 .* has left before"):
            variable(strategy, 2.0)
        assert v.assign_add(1.0) > 1


def test_what_does_not_fit_is_the_error_of_who_asked(way) -> None:
    with made(variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        sharded = variable(strategy, np.zeros((5, 2)), name="sharded")
        number = variable(strategy, 1.0, name="number")
        rows = np.ones((1, 2))
        for v in (sharded, number):
            for operand in (
                np.zeros((5, 3)),
                np.zeros((6, 2)),
                "x",
                object(),
                np.zeros((5, 2), "c8"),
            ):
                with pytest.raises((TypeError, ValueError), match=v.name):
                    v.assign(operand)
        for index in (5, -1):
            with pytest.raises(IndexError, match="'sharded' is out of bounds: it has rows 0 to 4"):
                sharded.scatter_add(ms.IndexedSlices(rows, [index]))
            with pytest.raises(IndexError, match="'sharded' is out of bounds: it has rows 0 to 4"):
                sharded.sparse_read([index])
        with pytest.raises((TypeError, ValueError)):
            sharded.scatter_add(ms.IndexedSlices(np.ones((1, 3)), [0]))
        with pytest.raises((TypeError, ValueError)):
            number.scatter_add(ms.IndexedSlices(np.ones(1), [0]))
        with pytest.raises((TypeError, ValueError, IndexError), match="number"):
            number.sparse_read([0])
        workers.Barrier()
        assert not sharded.numpy().any()
        assert number.numpy() == 1
        workers.Barrier()
        number.assign_add(1.0)
        workers.Barrier()
        assert number.numpy() == 1 + workers.size


def test_an_error_of_a_server_comes_to_who_asked_and_it_serves_on(way) -> None:
    with made() as strategy:
        if strategy is None:
            return
        v = variable(strategy, np.zeros(3))
        client = strategy.extended.job.client
        client.rpc.call(v.address.server, "rows", None)  # nobody waits for this one's error
        for kind, body, error in (
            ("pull", (77, None), ms.errors.NotFoundError),
            ("rows", (v.address.key, inline(np.array([9]))), IndexError),
            ("pull", "nonsense", ValueError),
            ("pull", None, TypeError),
        ):
            reply = client.rpc.call(v.address.server, kind, body)
            with pytest.raises(error):
                reply.wait()
        assert not v.numpy().any()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_worker_with_several_replicas_combines_first(way, parts) -> None:
    with made(
        devices=["cpu:0", "cpu:1"], variable_partitioner=FixedShardsPartitioner(parts)
    ) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        assert strategy.num_replicas_in_sync == 2
        total = variable(strategy, np.zeros((3, 2)), aggregation=SUM)
        mean = variable(strategy, np.zeros((3, 2)), aggregation=MEAN)
        none = variable(strategy, np.zeros((3, 2)))

        def replica() -> int:
            return ms.get_replica_context().replica_id_in_sync_group

        def step() -> None:
            total.assign_add(np.full((3, 2), replica() + 1.0))
            mean.assign_add(np.full((3, 2), replica() + 1.0))
            total.scatter_add(ms.IndexedSlices(np.ones((1, 2)), [replica()]))
            assert total.read_value().shape == (3, 2)
            assert mean.sparse_read([2]).shape == (1, 2)

        strategy.run(step)
        workers.Barrier()
        n = workers.size
        assert total.numpy()[:, 0].tolist() == [4 * n, 4 * n, 3 * n]
        assert (mean.numpy() == 1.5 * n).all()
        with pytest.raises(ValueError, match="give it an aggregation"):
            strategy.run(lambda: none.assign_add(np.ones((3, 2))))


@pytest.mark.parametrize("k", [None, 0])
def test_each_worker_reads_its_own_part_of_the_input(k) -> None:
    with made(max_staleness=k) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        batch = 2 * workers.size
        data = np.arange(4.0 * batch)
        batches = [data[i : i + batch] for i in range(0, len(data), batch)]
        dataset = strategy.experimental_distribute_dataset(batches)
        mine = [np.asarray(strategy.run(lambda x: x, args=(x,))) for x in dataset]
        everything = workers.allgather(np.concatenate(mine).tolist())
        assert sorted(itertools.chain(*everything)) == data.tolist()
        seen = []
        strategy.distribute_datasets_from_function(
            lambda context: (
                seen.append((context.num_input_pipelines, context.input_pipeline_id))
                or [np.zeros(1)]
            )
        )
        assert seen == [(workers.size, workers.rank)]


def test_alone_nobody_else_changes_anything(way) -> None:
    with made(NUM_PS[-1], variable_partitioner=FixedShardsPartitioner(2)) as strategy:
        if strategy is None:
            return
        workers = workers_of(strategy)
        v = variable(strategy, np.zeros((2, 3000)))
        for _ in range(20):
            if workers.rank == 0:
                with strategy.extended.checkpoints.unchanging():
                    value = v.numpy()
                    assert value.min() == value.max()  # each push on both servers, or on none
                    v.assign_add(np.ones((2, 3000)))
                    assert np.array_equal(v.numpy(), value + 1)
            else:
                v.assign_add(np.ones((2, 3000)))
        workers.Barrier()
        assert (v.numpy() == 20 * workers.size).all()


def test_memory_and_files_are_given_back(way) -> None:
    def use(pushes: int) -> None:
        with made() as strategy:
            if strategy is None:
                return
            v = variable(strategy, np.zeros(100_000))
            for _ in range(pushes):
                v.assign_add(np.ones(100_000))
                v.read_value()
            v.scatter_add(ms.IndexedSlices(np.ones(5), np.arange(5)))

    def in_use() -> tuple[int, int]:
        gc.collect()
        files = descriptors("memfd:mpistrat") + descriptors("pipe:") + descriptors("pidfd")
        return files, mapped_bytes("memfd:mpistrat")

    use(5)
    before, resident = in_use(), _resident()
    use(1000)
    use(5)
    files, nbytes = in_use()
    assert files <= before[0]  # what earlier tests left may go meanwhile
    assert nbytes <= before[1]
    assert _resident() - resident < 30 << 20


def _resident() -> int:
    with open("/proc/self/statm") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("chief", [False, True])
def test_servers_that_are_told_to_join(chief) -> None:
    tasks = [("chief" if chief else "worker", 0), ("ps", 0), ("worker", 0 if chief else 1)]
    tasks += [("worker", 1 if chief else 2)]
    tasks = tasks[:SIZE]
    if chief and SIZE == 2:
        tasks = [("worker", 0), ("ps", 0)]
        chief = False
    jobs: dict[str, list[str]] = {}
    for job, index in tasks:
        jobs.setdefault(job, []).append(f"{job}:{index}")
    job, index = tasks[RANK]
    if job == "ps" or (chief and job == "worker"):
        server = ms.Server(jobs, job, index)
        assert server.target == f"mpi://{RANK}"
        server.join()
        server.join()  # again: there is nothing left to do
        WORLD.Barrier()
        return
    resolver = ms.cluster_resolver.SimpleClusterResolver(
        ms.cluster_resolver.ClusterSpec(jobs), task_type=job, task_id=index
    )
    cls = ms.ParameterServerStrategy if chief else ParameterServerStrategy
    with strategy_on_servers(lambda: cls(resolver)) as strategy:
        v = variable(strategy, 0)
        if chief:
            coordinator = ms.coordinator.ClusterCoordinator(strategy)
            for _ in range(10):
                coordinator.schedule(lambda: v.assign_add(1) and None)
            coordinator.join()
            assert v.numpy() == 10
        else:
            v.assign_add(1)
            workers = workers_of(strategy)
            workers.Barrier()
            assert v.numpy() == workers.size


def test_the_strategy_of_a_coordinator(way) -> None:
    if SIZE < 3:
        return
    with strategy_on_servers(lambda: ms.ParameterServerStrategy(num_ps=1)) as strategy:
        if strategy is None:
            return
        assert RANK == 0
        coordinator = ms.coordinator.ClusterCoordinator(strategy)
        total = variable(strategy, np.zeros(2000))

        def add(number):
            total.assign_add(np.full(2000, float(number)))
            return number

        values = [coordinator.schedule(add, args=(number,)) for number in range(50)]
        coordinator.join()
        assert coordinator.fetch(values) == list(range(50))
        assert (total.numpy() == sum(range(50))).all()
        strategy.shutdown()
        with contextlib.suppress(RuntimeError):
            strategy.shutdown()  # again
