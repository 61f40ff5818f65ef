"""Every call of `torch.distributed` on CPU tensors, by the backend "mpistrat"."""

import datetime
import os
import re
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from mpi4py import MPI
from torch.distributed import ReduceOp

from mpistrat.errors import CollectiveMismatchError, StallError
from mpistrat.torch_distributed import work as works_of_torch
from support.rank_errors import errors_of_ranks

pytestmark = pytest.mark.usefixtures("default_group")
several = pytest.mark.mpi(min_size=2)

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST, NEXT, BEFORE = SIZE - 1, (RANK + 1) % SIZE, (RANK - 1) % SIZE
SUM = SIZE * (SIZE - 1) // 2  # 0 + 1 + … + n-1
HERE = os.path.basename(__file__)

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
# Those of these have no sums.
BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values).to(dtype)


def equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def views(dtype=torch.float32):
    """Tensors of shape (2, 3) whose memory is not in the order of their elements, and one without elements."""
    yield torch.zeros(3, 2, dtype=dtype).t()
    yield torch.zeros(4, 6, dtype=dtype)[::2, 1::2]
    yield torch.zeros(2, 3, 2, dtype=dtype)[..., 1]
    yield torch.zeros(2, 0, 3, dtype=dtype)


def every_view():
    return [view for dtype in (torch.float32, torch.complex64) for view in views(dtype)]


def raised(call):
    """What every rank raises in `call`, as (class, message); each message has the program's line."""
    errors = [(name, text) for name, text, _ in errors_of_ranks(call)]
    for name, text in errors:
        if name == "CollectiveMismatchError":
            assert HERE in text, text
            assert "torch/distributed" not in text, text
    return errors


# Reductions


def test_all_reduce_of_every_dtype():
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX):
        total = tensor(RANK, RANK + 1, 2, dtype=dtype)
        dist.all_reduce(total)
        equal(total, tensor(SUM, SUM + SIZE, 2 * SIZE, dtype=dtype))
        mean = tensor(2 * RANK, 7, dtype=dtype)
        dist.all_reduce(mean, ReduceOp.AVG)
        equal(mean, tensor(SIZE - 1, 7, dtype=dtype))
    for dtype in (*INTEGERS, *FLOATS):  # torch has no others of complex numbers
        product = tensor(2, 3 if RANK == LAST else 1, dtype=dtype)
        dist.all_reduce(product, ReduceOp.PRODUCT)
        equal(product, tensor(2**SIZE, 3, dtype=dtype))
        highest, lowest = tensor(RANK, 3, dtype=dtype), tensor(RANK + 1, 3, dtype=dtype)
        dist.all_reduce(highest, ReduceOp.MAX)
        dist.all_reduce(lowest, ReduceOp.MIN)
        equal(highest, tensor(LAST, 3, dtype=dtype))
        equal(lowest, tensor(1, 3, dtype=dtype))
    for dtype in FLOATS:
        scaled = tensor(1, 2, dtype=dtype)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        equal(scaled, tensor(SIZE / 2, SIZE, dtype=dtype))


def test_bits_and_booleans():
    for dtype in INTEGERS:
        expected = {
            ReduceOp.BAND: (5, int(SIZE == 1)),
            ReduceOp.BOR: (5, 2**SIZE - 1),
            ReduceOp.BXOR: (5 * (SIZE % 2), 2**SIZE - 1),
        }
        for op, values in expected.items():
            bits = tensor(5, 1 << RANK, dtype=dtype)
            dist.all_reduce(bits, op)
            equal(bits, tensor(*values, dtype=dtype))
    either, both = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), (ReduceOp.PRODUCT, ReduceOp.MIN)
    for op in (*either, *both, ReduceOp.BAND):
        flags = torch.tensor([True, False, RANK == 0])
        dist.all_reduce(flags, op)
        equal(flags, torch.tensor([True, False, op in either or SIZE == 1]))


def test_operations_that_a_dtype_has_not():
    wrong = [(ReduceOp.BAND, torch.float32), (ReduceOp.BXOR, torch.bfloat16)]
    wrong += [(ReduceOp.AVG, torch.bool), (ReduceOp.SUM, torch.float8_e5m2)]
    for op, dtype in wrong:
        for name, text in raised(
            lambda op=op, dtype=dtype: dist.all_reduce(tensor(1, dtype=dtype), op)
        ):
            assert name in ("TypeError", "ValueError", "NotImplementedError"), (
                op,
                dtype,
                name,
                text,
            )
            assert str(dtype).removeprefix("torch.") in text
    dist.barrier()


def test_reduce_and_reduce_scatter():
    for op, total in (
        (ReduceOp.SUM, SUM + SIZE),
        (ReduceOp.MAX, SIZE),
        (ReduceOp.AVG, (SIZE + 1) / 2),
    ):
        own = tensor(RANK + 1, 0)
        dist.reduce(own, LAST, op)
        equal(own, tensor(total, 0) if RANK == LAST else tensor(RANK + 1, 0))

        part, parts = torch.empty(2), [tensor(RANK + 1, RANK + 1)] * SIZE
        dist.reduce_scatter(part, parts, op)
        equal(part, tensor(total, total))
        dist.reduce_scatter_tensor(part, torch.cat(parts), op)
        equal(part, tensor(total, total))
    integers = torch.tensor([2 * RANK + 1])
    dist.reduce(integers, 0, ReduceOp.AVG)
    equal(integers, torch.tensor([SIZE if RANK == 0 else 2 * RANK + 1]))
    flag = torch.tensor([False])
    dist.reduce_scatter_tensor(flag, torch.arange(SIZE) == RANK)
    equal(flag, torch.tensor([True]))
    uneven = [torch.full((r, 2), float(RANK)) for r in range(SIZE)]
    part = torch.empty(RANK, 2)
    dist.reduce_scatter(part, uneven)
    equal(part, torch.full((RANK, 2), float(SUM)))


def test_sums_of_sparse_tensors():
    own = torch.sparse_coo_tensor([[0, RANK]], [1.0, 2.0], (SIZE + 1,))
    dist.all_reduce(own)
    expected = torch.full((SIZE + 1,), 2.0)
    expected[0], expected[SIZE] = SIZE + 2, 0
    equal(own.to_dense(), expected)


# Data that moves as it is


def test_broadcast_and_gathers_of_every_dtype():
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX, *BYTES):
        own = tensor(RANK, 1, dtype=dtype)
        sent = own.clone()
        dist.broadcast(sent, LAST)
        equal(sent, tensor(LAST, 1, dtype=dtype))
        everyone = [tensor(rank, 1, dtype=dtype) for rank in range(SIZE)]
        parts = [torch.empty_like(own) for _ in range(SIZE)]
        dist.all_gather(parts, own)
        equal(parts, everyone)
        whole = own.new_empty(2 * SIZE)
        dist.all_gather_into_tensor(whole, own)
        equal(whole.view(SIZE, 2), torch.stack(everyone))
        parts = [torch.empty_like(own) for _ in range(SIZE)] if RANK == LAST else None
        dist.gather(own, parts, LAST)
        assert RANK != LAST or all(map(torch.equal, parts, everyone))
        got = torch.empty_like(own)
        dist.scatter(got, everyone if RANK == LAST else None, LAST)
        equal(got, own)
        dist.all_to_all(parts := [torch.empty_like(own) for _ in range(SIZE)], [own] * SIZE)
        equal(parts, everyone)


def test_all_gather_of_different_shapes():
    parts = [torch.empty(rank, 2) for rank in range(SIZE)]
    dist.all_gather(parts, torch.full((RANK, 2), float(RANK)))
    equal(parts, [torch.full((rank, 2), float(rank)) for rank in range(SIZE)])


def test_all_to_all_of_different_shapes():
    """Rank r sends r + s rows to rank s."""
    sent, received = [RANK + r for r in range(SIZE)], [r + RANK for r in range(SIZE)]
    rows = torch.full((sum(sent), 3), float(RANK))
    out = torch.empty(sum(received), 3)
    dist.all_to_all_single(out, rows, received, sent)
    expected = torch.cat([torch.full((r + RANK, 3), float(r)) for r in range(SIZE)])
    equal(out, expected)
    outs = [torch.empty(count, 3) for count in received]
    dist.all_to_all(outs, list(rows.split(sent)))
    equal(torch.cat(outs), expected)
    even = torch.empty(2 * SIZE)
    dist.all_to_all_single(even, torch.arange(2.0 * SIZE) + 100 * RANK)
    equal(
        even.view(SIZE, 2),
        torch.stack([tensor(2 * RANK, 2 * RANK + 1) + 100 * r for r in range(SIZE)]),
    )


def test_views():
    for i, own in enumerate(every_view()):

        def fill(view, value):
            return view.copy_(torch.arange(view.numel()).reshape(view.shape) + value)

        def like(value, own=own):
            return fill(torch.empty_like(own, memory_format=torch.contiguous_format), value)

        fill(own, RANK)
        dist.all_reduce(own)
        equal(own.contiguous(), sum(like(rank) for rank in range(SIZE)))
        fill(own, RANK)
        dist.broadcast(own, LAST)
        equal(own.contiguous(), like(LAST))
        fill(own, RANK)
        parts = [every_view()[i] for _ in range(SIZE)]
        dist.all_gather(parts, own)
        equal([part.contiguous() for part in parts], [like(rank) for rank in range(SIZE)])
        requests = [dist.isend(own, NEXT), dist.irecv(parts[0], BEFORE)] if SIZE > 1 else []
        for request in requests:
            request.wait()
        if SIZE > 1:
            equal(parts[0].contiguous(), like(BEFORE))


def test_objects():
    words = [f"{LAST}", {LAST: LAST}] if RANK == LAST else [None, None]
    dist.broadcast_object_list(words, LAST)
    assert words == [f"{LAST}", {LAST: LAST}]
    everyone = [None] * SIZE
    dist.all_gather_object(everyone, "x" * RANK)
    assert everyone == ["x" * rank for rank in range(SIZE)]
    everyone = [None] * SIZE if RANK == 0 else None
    dist.gather_object((RANK,), everyone, 0)
    assert RANK or everyone == [(rank,) for rank in range(SIZE)]
    own = [None]
    dist.scatter_object_list(own, [{r} for r in range(SIZE)] if RANK == LAST else None, LAST)
    assert own == [{RANK}]


# Messages


@several
def test_messages_of_every_dtype():
    for dtype in (*INTEGERS, *FLOATS, *COMPLEX, *BYTES):
        got = torch.empty(2, dtype=dtype)
        for request in (
            dist.irecv(got, BEFORE, tag=3),
            dist.isend(tensor(RANK, 1, dtype=dtype), NEXT, tag=3),
        ):
            request.wait()
        equal(got, tensor(BEFORE, 1, dtype=dtype))


@several
def test_messages_from_any_rank():
    if RANK:
        dist.send(torch.full((RANK,), RANK), 0, tag=RANK)
        return
    got = {
        tag: dist.recv(torch.empty(tag, dtype=torch.int64), None, tag=tag) for tag in range(1, SIZE)
    }
    assert got == {rank: rank for rank in range(1, SIZE)}


@several
def test_messages_move_while_the_program_computes():
    """A megabyte, of which both ranks are told only when they begin; tags out of order; what is coalesced."""
    big, got = torch.full((1 << 18,), float(RANK)), torch.empty(1 << 18)
    ops = [dist.P2POp(dist.isend, big, NEXT), dist.P2POp(dist.irecv, got, BEFORE)]
    works = dist.batch_isend_irecv(ops)
    for work in works:
        work.wait()
        assert work.is_completed()
        assert work.is_success()
    equal(got, torch.full((1 << 18,), float(BEFORE)))
    for tag in (1, 2):
        dist.isend(tensor(tag), NEXT, tag=tag)
    for tag in (2, 1):
        dist.recv(received := tensor(0), BEFORE, tag=tag)
        equal(received, tensor(tag))


@several
def test_a_message_that_does_not_fit():
    if RANK == 0:
        dist.send(tensor(1, 2), 1)
    elif RANK == 1:
        for room in (1, 3):
            if room == 3:
                dist.recv(torch.empty(2), 0)
            with pytest.raises(
                ValueError, match=f"{4 * room} bytes were expected, rank 0 sent"
            ) as error:
                dist.recv(torch.empty(room), 0)
            assert HERE in str(error.value)
    if RANK == 0:
        dist.send(tensor(1, 2), 1)
        dist.send(tensor(1, 2), 1)


@several
def test_a_message_that_does_not_come():
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    if RANK == 0:
        with pytest.raises(
            StallError, match=r"recv\(float32, \(2,\)\) from rank 1, tag 7, at .*" + HERE
        ):
            dist.recv(torch.empty(2), 1, group, tag=7)
    dist.destroy_process_group(group)
    dist.barrier()


@several
def test_the_future_of_a_message_that_does_not_come(monkeypatch):
    """It has nobody to raise to: the job ends."""
    errors, ended = [], threading.Event()
    monkeypatch.setattr(
        works_of_torch, "end_job_for", lambda error: (errors.append(error), ended.set())
    )
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.1))
    if RANK == 0:
        dist.irecv(torch.empty(2), 1, group, tag=7).get_future().then(lambda done: done.value())
        assert ended.wait(10)
        (error,) = errors
        assert isinstance(error, StallError)
        assert re.search(
            r"0.1 s in recv\(float32, \(2,\)\) from rank 1, tag 7, at .*" + HERE, str(error)
        )
    dist.barrier()


# Works


def test_works_end_in_order():
    tensors = [tensor(RANK + i) for i in range(20)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    last = tensor(RANK)
    dist.all_reduce(last)  # waits for what was begun before
    assert all(work.is_completed() and work.is_success() for work in works)
    assert [work.exception() for work in works] == [None] * 20
    equal(tensors, [tensor(SUM + SIZE * i) for i in range(20)])
    assert works[3].result()[0] is tensors[3]


def test_futures():
    own = tensor(RANK + 1)
    future = dist.all_reduce(own, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait() == 2 * (SUM + SIZE)
    nested = dist.broadcast(own, 0, async_op=True).get_future()

    def reduced_again(done):
        (total,) = done.value()
        dist.all_reduce(total)  # on the thread that has completed the future
        return total

    equal(nested.then(reduced_again).wait(), tensor((SUM + SIZE) * SIZE))


def test_coalesced_calls():
    ones, twos = tensor(RANK, 1), torch.full((2, 2), RANK)
    with dist._coalescing_manager():
        dist.all_reduce(ones)
        dist.all_reduce(twos)
    equal([ones, twos], [tensor(SUM, SIZE), torch.full((2, 2), SUM)])
    outs = [torch.empty(SIZE), torch.empty(2 * SIZE)]
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(outs[0], tensor(RANK))
        dist.all_gather_into_tensor(outs[1], tensor(RANK, RANK))
    works.wait()
    equal(outs[0], torch.arange(float(SIZE)))
    equal(outs[1], torch.arange(float(SIZE)).repeat_interleave(2))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        dist.all_reduce(ones, async_op=True)
        dist.broadcast(twos, 0, async_op=True)
    works.wait()
    equal([ones, twos], [tensor(SUM * SIZE, SIZE * SIZE), torch.full((2, 2), SUM)])


def test_without_threads_in_mpi(monkeypatch):
    """A call that the program does not wait for has ended when it returns."""
    group = dist.new_group()
    monkeypatch.setattr(group.communicator, "thread_multiple", False)
    total = tensor(RANK)
    work = dist.all_reduce(total, group=group, async_op=True)
    equal(total, tensor(SUM))
    assert work.wait()
    dist.destroy_process_group(group)


# Groups


def test_overlapping_groups():
    """Of pairs of neighbours, and of all pairs: a rank is in several."""
    groups = {
        (low, high): dist.new_group([low, high]) for high in range(SIZE) for low in range(high)
    }
    for (low, high), group in groups.items():
        if RANK in (low, high):
            assert dist.get_process_group_ranks(group) == [low, high]
            own = tensor(RANK)
            dist.all_reduce(own, group=group, async_op=True).wait()
            equal(own, tensor(low + high))
            dist.broadcast(own.fill_(RANK), high, group)
            equal(own, tensor(high))
    for pair, group in groups.items():
        if RANK in pair:
            dist.destroy_process_group(group)


def test_a_thread_for_each_group():
    groups, results = [dist.new_group() for _ in range(3)], {}

    def work(number):
        for i in range(30):
            own = tensor(RANK + i, number)
            work = dist.all_reduce(own, group=groups[number], async_op=bool(i % 2))
            if work:
                work.wait()
            equal(own, tensor(SUM + SIZE * i, SIZE * number))
        results[number] = True

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True, 2: True}
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("groups", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_a_group_that_is_destroyed_leaves_its_communicators(groups):
    communicators = set()
    for i in range(groups):
        group = dist.new_group()
        communicators.add(group.communicator)
        if i % 20 == 0:
            dist.all_reduce(own := tensor(RANK), group=group, async_op=bool(i % 40))
            group.barrier().wait()
            equal(own, tensor(SUM))
        dist.destroy_process_group(group)
    assert SIZE == 1 or len(communicators) == 1


def test_a_group_that_a_rank_destroys_late():
    first = dist.new_group()
    if RANK:
        dist.destroy_process_group(first)
    second = dist.new_group()
    assert SIZE == 1 or second.communicator is not first.communicator
    if RANK == 0:
        dist.destroy_process_group(first)
    dist.all_reduce(own := tensor(RANK), group=second)
    equal(own, tensor(SUM))
    dist.destroy_process_group(second)


@several
def test_a_message_does_not_reach_the_next_group():
    first = dist.new_group()
    if RANK == 0:
        dist.isend(tensor(1), 1, first)
    dist.destroy_process_group(first)
    second = dist.new_group()
    if RANK == 0:
        dist.send(tensor(2), 1, second)
    elif RANK == 1:
        dist.recv(got := tensor(0), 0, second)
        equal(got, tensor(2))
    dist.destroy_process_group(second)


def test_a_destroyed_group_is_not_used():
    group = dist.new_group()
    native = group.allreduce
    dist.destroy_process_group(group)
    with pytest.raises(RuntimeError, match=r"the process group .* was destroyed"):
        native([tensor(1)])


def test_meshes_and_functional_collectives():
    rows = 2 if SIZE == 4 else 1
    mesh = dist.device_mesh.init_device_mesh("cpu", (rows, SIZE // rows), mesh_dim_names=("a", "b"))
    own = tensor(RANK)
    total = functional.all_reduce(own, "sum", mesh["a"])
    total = functional.all_reduce(total, "sum", mesh["b"])
    equal(functional.wait_tensor(total), tensor(SUM))
    equal(own, tensor(RANK))
    gathered = functional.all_gather_tensor(own, 0, dist.group.WORLD)
    equal(functional.wait_tensor(gathered), torch.arange(float(SIZE)))
    part = functional.reduce_scatter_tensor(torch.ones(SIZE), "avg", 0, dist.group.WORLD)
    equal(functional.wait_tensor(part), tensor(1))


# Errors


@several
def test_shapes_that_differ():
    def rows(call):
        return lambda: call(torch.zeros(2 if RANK == 0 else 3, 2))

    calls = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda own: dist.broadcast(own, 0),
        "reduce": lambda own: dist.reduce(own, 0),
        "all_gather_into": lambda own: dist.all_gather_into_tensor(
            torch.zeros(SIZE * len(own), 2), own
        ),
        "gather": lambda own: dist.gather(own, [own] * SIZE if RANK == 0 else None, 0),
        "scatter": lambda own: dist.scatter(own, [own] * SIZE if RANK == 0 else None, 0),
        "reduce_scatter": lambda own: dist.reduce_scatter(own, [own] * SIZE),
    }
    for name, call in calls.items():
        errors = raised(rows(call))
        assert {kind for kind, _ in errors} == {"CollectiveMismatchError"}, (name, errors)
        for _, text in errors:
            assert name in text
            shapes = ("(2, 2)", "(3, 2)")
            if name == "reduce_scatter":  # in one piece
                shapes = (f"({4 * SIZE},)", f"({6 * SIZE},)")
            assert all(shape in text for shape in shapes), text
    dist.barrier()


@several
def test_what_one_rank_finds_wrong_all_hear_of():
    wrong = RANK == LAST
    calls = [
        lambda: dist.all_gather([tensor(0)] * (SIZE - wrong), tensor(0)),
        lambda: dist.all_to_all([tensor(0)] * SIZE, [tensor(0)] * (SIZE - wrong)),
        lambda: dist.reduce_scatter(tensor(0), [tensor(0)] * (SIZE - wrong)),
        lambda: dist.all_to_all_single(torch.empty(SIZE), torch.empty(SIZE + wrong)),
        lambda: dist.all_reduce(tensor(0), ReduceOp.BAND if wrong else ReduceOp.SUM),
    ]
    for i, call in enumerate(calls):
        errors = raised(call)
        assert {kind for kind, _ in errors} == {"CollectiveMismatchError"}, (i, errors)
        assert f"rank {LAST}" in errors[0][1], (i, errors)
    dist.barrier()


@several
def test_arguments_of_the_group_s_own_methods():
    group = dist.group.WORLD
    contribution = torch.ones(2)
    group.reduce(contribution, np.int64(0)).wait()  # the root, as NumPy counts it
    if RANK == 0:
        equal(contribution, torch.full((2,), float(SIZE)))
    wrong = "no operation" if RANK == LAST else ReduceOp.SUM
    errors = raised(lambda: group.allreduce([torch.ones(2)], wrong).wait())
    assert all(f"rank {LAST}: raised TypeError" in text for _, text in errors), errors


@several
def test_calls_that_differ():
    errors = raised(lambda: dist.all_reduce(tensor(0)) if RANK else dist.barrier())
    assert all("all_reduce" in text and "barrier" in text for _, text in errors), errors


@several
def test_the_error_of_a_call_that_goes_on_is_raised_by_wait():
    work = dist.all_reduce(torch.zeros(2 + RANK), async_op=True)
    errors = raised(work.wait)
    assert {kind for kind, _ in errors} == {"CollectiveMismatchError"}
    assert "(2,)" in errors[0][1]
    assert isinstance(work.exception(), CollectiveMismatchError)
    assert not work.is_success()
    dist.barrier()


@several
def test_an_error_that_nobody_waited_for_is_raised_by_the_next_call():
    work = dist.all_reduce(torch.zeros(2 + RANK), async_op=True)
    while not work.is_completed():
        threading.Event().wait(0.001)
    with pytest.raises(CollectiveMismatchError, match=r"\(2,\)"):
        dist.barrier()
    dist.barrier()


@several
def test_a_work_that_takes_too_long():
    group = dist.new_group()
    if RANK == 0:
        work = dist.barrier(group, async_op=True)
        with pytest.raises(StallError, match=r"when Work.wait\(timeout=0.1 s\) gave up"):
            work.wait(datetime.timedelta(seconds=0.1))
    dist.barrier()
    if RANK:
        dist.barrier(group)
    else:
        assert work.wait()
    dist.destroy_process_group(group)


def test_a_forked_child_is_told():
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        texts = []
        for call in (
            dist.barrier,
            lambda: dist.all_reduce(tensor(0), async_op=True),
            lambda: dist.isend(tensor(0), NEXT),
        ):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                texts.append(str(error))
        os.write(write, "\n".join(texts).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        texts = file.read().splitlines()
    os.waitpid(child, 0)
    assert len(texts) == 3
    assert all(
        f"in a forked child of rank {RANK}" in text for text in texts[: 3 if SIZE > 1 else 2]
    ), texts
