"""Communicators: buffers of every kind, objects, splits, and the check that ranks make the same calls."""

import numpy as np
import pytest
import torch
from mpi4py import MPI

from mpistrat.communicators import reducing
from mpistrat.communicators.construction import communicator_for
from mpistrat.communicators.contract.contract import Contract
from mpistrat.communicators.local import LocalCommunicator
from mpistrat.communicators.router import Router, Transports
from mpistrat.communicators.transports.mpi import MpiTransport
from mpistrat.errors import CollectiveMismatchError
from support.rank_errors import errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
LAST = SIZE - 1
SUM_OF_RANKS = SIZE * (SIZE - 1) // 2  # 0 + 1 + … + n-1

INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
DTYPES = {
    "numpy": (*INTEGERS, *FLOATS, "uint16", "uint32", "uint64"),
    "torch": (*INTEGERS, *FLOATS, "bfloat16"),
}
every_library = pytest.mark.parametrize("library", DTYPES)


@pytest.fixture(scope="module")
def checked():
    """What strategies use, over MPI even where the rank is alone."""
    mpi = MpiTransport(WORLD.Dup())
    return Router(Transports(mpi), Contract(mpi, "tests"))


@pytest.fixture(scope="module", params=["mpi", "for the world"])
def comm(request, checked):
    return Router(Transports(checked.mpi)) if request.param == "mpi" else communicator_for(WORLD)


def make(library, dtype, values):
    if library == "torch":
        return torch.tensor(values, dtype=getattr(torch, dtype))
    return np.array(values, dtype)


def same(array, values):
    like = type(array)
    expected = (
        torch.tensor(values, dtype=array.dtype)
        if like is torch.Tensor
        else np.array(values, array.dtype)
    )
    assert tuple(array.shape) == tuple(expected.shape)
    return bool((array == expected).all())


@every_library
def test_all_reduce_of_every_dtype(comm, library):
    for dtype in DTYPES[library]:
        buffer = make(library, dtype, [RANK, RANK + 1, 2])
        comm.all_reduce(buffer)
        assert same(buffer, [SUM_OF_RANKS, SUM_OF_RANKS + SIZE, 2 * SIZE]), dtype

        operand, out = make(library, dtype, [RANK + 1]), make(library, dtype, [0])
        comm.all_reduce(operand, out=out)
        assert same(operand, [RANK + 1])
        assert same(out, [SUM_OF_RANKS + SIZE]), dtype

        if not dtype.startswith("complex"):
            highest, lowest = make(library, dtype, [RANK, 3]), make(library, dtype, [RANK + 1, 3])
            comm.all_reduce(highest, "max")
            comm.all_reduce(lowest, "min")
            assert same(highest, [LAST, 3]), dtype
            assert same(lowest, [1, 3]), dtype


@every_library
def test_products_and_bits_of_every_dtype(comm, library):
    of_bits = {"band": [5, int(SIZE == 1)], "bor": [5, 2**SIZE - 1]}
    of_bits["bxor"] = [5 * (SIZE % 2), 2**SIZE - 1]
    for dtype in DTYPES[library]:
        product = make(library, dtype, [2, 3 if RANK == LAST else 1])
        comm.all_reduce(product, "prod")
        assert same(product, [2**SIZE, 3]), dtype
        for op, expected in of_bits.items():
            bits = make(library, dtype, [5, 1 << RANK])
            if "int" in dtype:
                comm.all_reduce(bits, op)
                assert same(bits, expected), (dtype, op)
            else:
                with pytest.raises(TypeError, match=f"'{op}' combines the bits of integers, got"):
                    comm.all_reduce(bits, op)


@every_library
def test_broadcast_and_all_gather_of_every_dtype(comm, library):
    for dtype in DTYPES[library]:
        sent = make(library, dtype, [RANK + 5, 2])
        comm.broadcast(sent, root=LAST)
        assert same(sent, [LAST + 5, 2]), dtype

        parts = comm.all_gather(make(library, dtype, [[RANK, 7]] * (RANK + 1)))
        assert [type(part) for part in parts] == [type(sent)] * SIZE
        for rank, part in enumerate(parts):
            assert part.dtype == sent.dtype
            assert same(part, [[rank, 7]] * (rank + 1)), dtype


def of_any_dtype(dtype, values):
    """As a tensor: NumPy lacks some dtypes, and some have no sums."""
    return torch.tensor(values).to(getattr(torch, dtype))


ANY_DTYPE = ("uint8", "bool", "float64", "bfloat16", "float8_e4m3fn", "complex64")


@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_all_gather_into(comm, dtype):
    """The shape of the whole is the caller's; a rank's part may lie there before."""
    expected = of_any_dtype(dtype, [[rank, 1] for rank in range(SIZE)])
    for elements in (1, 3000, 40_000):
        out = torch.zeros(2 * SIZE * elements, dtype=expected.dtype)
        mine = expected[RANK].repeat(elements).reshape(elements, 2)
        comm.all_gather_into(mine, out)
        assert torch.equal(out.reshape(SIZE, -1).double(), expected.repeat(1, elements).double())

        part = torch.zeros(SIZE, elements, 2, dtype=expected.dtype)
        part[RANK] = mine
        comm.all_gather_into(part[RANK], part)
        assert torch.equal(part.reshape(-1).double(), out.double())
    if dtype in DTYPES["numpy"]:
        gathered = np.zeros((SIZE, 2), dtype)
        comm.all_gather_into(expected[RANK].numpy(), gathered)
        assert (gathered == expected.numpy()).all()


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("rows", [1, 5000])
def test_all_to_all_of_as_many_rows_to_each_rank(comm, dtype, rows):
    mine = of_any_dtype(dtype, [[RANK, rank] for rank in range(SIZE)])
    out = torch.zeros(SIZE * rows, 2, dtype=mine.dtype)
    counts = [rows] * SIZE
    comm.all_to_all(mine.repeat_interleave(rows, 0), out, counts, counts)
    expected = of_any_dtype(dtype, [[rank, RANK] for rank in range(SIZE)])
    assert torch.equal(out.double(), expected.repeat_interleave(rows, 0).double())


@pytest.mark.parametrize("factor", [0, 1, 2000, 10_000])
def test_all_to_all_of_other_numbers_of_rows(comm, factor):
    """Rank r sends r + 2 s rows to rank s, none of them to itself, and the last one sends nothing."""

    def rows(sender, receiver):
        return factor * (sender + 2 * receiver) * (sender not in (LAST, receiver))

    sent = [rows(RANK, rank) for rank in range(SIZE)]
    received = [rows(rank, RANK) for rank in range(SIZE)]
    mine = np.full((sum(sent), 3), RANK, np.int16)
    mine[:, 1] = np.repeat(np.arange(SIZE), sent)
    out = np.zeros((sum(received), 3), np.int16)
    comm.all_to_all(mine, out, sent, received)
    expected = [[rank, RANK, rank] for rank in range(SIZE)]
    assert (out == np.repeat(expected, received, 0)).all()


@pytest.mark.parametrize(
    ("library", "dtype", "first"),
    [("torch", "bfloat16", 256), ("torch", "float16", 2048), ("numpy", "float16", 2048)],
)
def test_short_floats_are_summed_in_float32_and_rounded_once(comm, library, dtype, first):
    """Next to `first` their numbers are 2 apart: added one by one, the ones would all be lost."""
    buffer = make(library, dtype, [first if RANK == 0 else 1, -1.5])
    comm.all_reduce(buffer)
    assert same(buffer, [first + SIZE - 1, -1.5 * SIZE])  # rounded in the same way


@every_library
def test_scalars_and_empty_arrays(comm, library):
    scalar = make(library, "float64", RANK + 0.5)
    assert [float(part) for part in comm.all_gather(scalar)] == [r + 0.5 for r in range(SIZE)]
    assert all(part.ndim == 0 for part in comm.all_gather(scalar))
    comm.all_reduce(scalar)
    assert same(scalar, SUM_OF_RANKS + SIZE / 2)
    scalar = make(library, "int32", RANK)
    comm.broadcast(scalar, LAST)
    assert same(scalar, LAST)

    empty = make(library, "float32", [[], []])
    comm.all_reduce(empty)
    comm.broadcast(empty)
    assert tuple(empty.shape) == (2, 0)
    assert [tuple(part.shape) for part in comm.all_gather(empty)] == [(2, 0)] * SIZE
    comm.reduce(empty, LAST)
    comm.all_gather_into(empty, make(library, "float32", []))
    comm.all_to_all(empty[:0], empty[:0], [0] * SIZE, [0] * SIZE)
    whole = make(library, "float32", [[]] * SIZE)
    comm.reduce_scatter(whole, make(library, "float32", [[]]))
    comm.all_to_all(whole, whole, [1] * SIZE, [1] * SIZE)

    scalar, whole = make(library, "int32", RANK), make(library, "int32", [7] * SIZE)
    comm.all_gather_into(scalar, whole)
    assert same(whole, list(range(SIZE)))
    comm.reduce_scatter(whole, scalar)
    assert same(scalar, SIZE * RANK)
    comm.reduce(scalar, LAST)
    assert same(scalar, SIZE * SUM_OF_RANKS if RANK == LAST else SIZE * RANK)


def test_all_gather_where_only_some_ranks_have_rows(comm):
    mine = np.full((RANK % 2, 3), RANK, np.float32)
    parts = comm.all_gather(mine)
    assert [part.shape for part in parts] == [(rank % 2, 3) for rank in range(SIZE)]
    assert np.concatenate(parts).tolist() == [[r] * 3 for r in range(SIZE) if r % 2]


@pytest.mark.parametrize("dtype", ["bool", "U3"])
def test_bytes_move_whatever_they_mean(comm, dtype):
    mine = np.array(["abc", ""]).astype(dtype) if RANK == LAST else np.array(["", "xyz"], dtype)
    expected = np.array(["abc", ""]).astype(dtype).tolist()
    assert comm.all_gather(mine)[LAST].tolist() == expected
    comm.broadcast(mine, LAST)
    assert mine.tolist() == expected


def test_many_megabytes(comm):
    elements = 3_000_001
    buffer = np.full(elements, RANK + 1, np.float32)
    comm.all_reduce(buffer)
    assert (buffer == SUM_OF_RANKS + SIZE).all()
    buffer[:] = RANK
    comm.broadcast(buffer, LAST)
    assert (buffer == LAST).all()
    parts = comm.all_gather(np.full(elements // (RANK + 1), RANK, np.int16))
    assert all(
        (part == rank).all() and part.size == elements // (rank + 1)
        for rank, part in enumerate(parts)
    )


def test_objects(comm):
    value = {"from": RANK, "long": "x" * 100_000}
    assert comm.broadcast_object(value, LAST)["from"] == LAST
    assert [v["from"] for v in comm.all_gather_object(value)] == list(range(SIZE))
    assert comm.broadcast_object(None) is None
    comm.barrier()


def test_split(checked):
    halves = checked.split(RANK % 2, key=-RANK)
    mine = [r for r in reversed(range(SIZE)) if r % 2 == RANK % 2]
    assert (halves.rank, halves.size) == (mine.index(RANK), len(mine))
    assert halves.all_gather_object(RANK) == mine
    total = np.array([RANK])
    halves.all_reduce(total)
    assert total.tolist() == [sum(mine)]
    assert {part.name for part in checked.contract.parts} == {halves.contract.name}
    checked.contract.parts.clear()


def test_there_is_one_communicator_of_ours_for_each_of_the_user_s():
    assert communicator_for(WORLD) is communicator_for(WORLD) or SIZE == 1
    alone = communicator_for(MPI.COMM_SELF)
    assert isinstance(alone, LocalCommunicator)
    other = WORLD.Dup()
    try:
        assert SIZE == 1 or communicator_for(other) is not communicator_for(WORLD)
    finally:
        other.Free()


# Calls that differ between ranks


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


DIFFERENT_CALLS = {
    "shape": (lambda c: c.all_reduce(ones(3)), lambda c: c.all_reduce(ones(4))),
    "same size, other shape": (
        lambda c: c.all_reduce(ones(2, 3)),
        lambda c: c.all_reduce(ones(3, 2)),
    ),
    "dtype": (lambda c: c.all_reduce(ones(3)), lambda c: c.all_reduce(ones(3, dtype="int32"))),
    "op": (lambda c: c.all_reduce(ones(3)), lambda c: c.all_reduce(ones(3), "max")),
    "label": (
        lambda c: c.all_reduce(ones(3), reducing(label="{'a': *}")),
        lambda c: c.all_reduce(ones(3), reducing(label="{'b': *}")),
    ),
    "root": (lambda c: c.broadcast(ones(3), 0), lambda c: c.broadcast(ones(3), c.size - 1)),
    "collective": (lambda c: c.all_reduce(ones(3)), lambda c: c.broadcast(ones(3))),
    "dimensions": (lambda c: c.all_gather(ones(3)), lambda c: c.all_gather(ones(3, 1))),
    "objects": (lambda c: c.all_gather_object(1), lambda c: c.broadcast_object(1)),
    "split": (lambda c: c.split(0), lambda c: c.barrier()),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("difference", DIFFERENT_CALLS)
def test_different_calls_are_the_same_error_on_every_rank(checked, difference):
    usual, odd = DIFFERENT_CALLS[difference]
    call = odd if RANK == LAST else usual
    with pytest.raises(CollectiveMismatchError) as raised:
        call(checked)
    text = str(raised.value).replace(f"this is rank {RANK} of {SIZE}", "")
    assert WORLD.allgather(text) == [text] * SIZE
    assert "test_communicators.py" in text
    assert f"rank {LAST}: " in text
    assert f"this is rank {RANK} of {SIZE}" in str(raised.value)
    total = ones(2)
    checked.all_reduce(total)
    assert total.tolist() == [SIZE, SIZE]


@pytest.mark.mpi(min_size=2)
def test_a_missing_call_is_found_at_the_next_one(checked):
    def calls():
        if RANK != 1:
            checked.all_reduce(ones(3), reducing(label="only on some ranks"))
        checked.broadcast(ones(2))

    assert {name for name, _, _ in errors_of_ranks(calls)} == {"CollectiveMismatchError"}
    checked.barrier()


@pytest.mark.mpi(min_size=2)
def test_no_bytes_have_moved_where_calls_differ(checked):
    buffer = np.full(2 + (RANK == LAST), RANK)
    with pytest.raises(CollectiveMismatchError):
        checked.all_reduce(buffer)
    assert (buffer == RANK).all()


def test_an_error_of_all_ranks_is_raised_as_it_is(checked):
    # What each says of its own operand may differ
    with pytest.raises(TypeError, match=f"operand of rank {RANK}"):
        checked.raise_together(TypeError(f"operand of rank {RANK}"))
    checked.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_is_everybody_s(checked):
    def calls():
        if RANK == LAST:
            checked.raise_together(ValueError("a wrong operand"))
        checked.all_reduce(ones(3))

    with pytest.raises(CollectiveMismatchError, match="raised ValueError: a wrong operand") as e:
        calls()
    assert (str(e.value.__cause__) == "a wrong operand") == (RANK == LAST)
    checked.barrier()


@pytest.mark.mpi(min_size=2)
def test_different_errors_name_each_other(checked):
    error = ValueError("mine") if RANK == 0 else TypeError("theirs")
    with pytest.raises(CollectiveMismatchError, match=r"ValueError: mine(.|\n)*TypeError: theirs"):
        checked.raise_together(error)


def test_an_unknown_op_is_refused_before_the_others_wait(checked):
    errors = errors_of_ranks(lambda: checked.all_reduce(ones(1), "mean"))
    assert {name for name, _, _ in errors} == {"ValueError"}
    checked.barrier()


WRONG_OPERANDS = {
    "another dtype": lambda c: c.all_gather_into(ones(1), ones(c.size, dtype="int32")),
    "too small": lambda c: c.all_gather_into(ones(2), ones(2 * c.size - 1)),
    "other strides": lambda c: c.all_gather_into(ones(2), ones(4 * c.size)[::2]),
    "too few counts": lambda c: c.all_to_all(ones(3), ones(3), [3], []),
    "more rows than there are": lambda c: c.all_to_all(
        ones(c.size), ones(c.size), [2] * c.size, [1] * c.size
    ),
    "fewer rows received": lambda c: c.all_to_all(
        ones(c.size), ones(c.size + 1), [1] * c.size, [1] * c.size
    ),
    "a negative count": lambda c: c.all_to_all(
        ones(0), ones(0), [1, -1][: c.size] + [0] * (c.size - 2), [0] * c.size
    ),
    "no rows": lambda c: c.all_to_all(np.ones(()), np.ones(()), [1], [1]),
    "other rows": lambda c: c.all_to_all(
        ones(c.size, 2), ones(c.size, 3), [1] * c.size, [1] * c.size
    ),
    "strides of rows": lambda c: c.all_to_all(
        ones(c.size, 4)[:, ::2], ones(c.size, 2), [1] * c.size, [1] * c.size
    ),
}


@pytest.mark.parametrize("wrong", WRONG_OPERANDS)
def test_wrong_operands_are_errors_before_the_others_wait(checked, wrong):
    call = WRONG_OPERANDS[wrong]
    with pytest.raises(ValueError, match=r"all_gather_into over|all_to_all|must be C-contiguous"):
        call(LocalCommunicator())
    errors = errors_of_ranks(lambda: call(checked))
    assert {name for name, _, _ in errors} == {"ValueError"}
    checked.barrier()


@pytest.mark.parametrize("out", [ones(3, 2), np.ones(2, np.int64)], ids=["shape", "dtype"])
def test_an_out_unlike_the_buffer_is_an_error_on_one_rank_too(checked, out):
    """NumPy would broadcast the sum to the other shape."""
    with pytest.raises(ValueError, match="out must be"):
        LocalCommunicator().all_reduce(ones(2), out=out)
    errors = errors_of_ranks(lambda: checked.all_reduce(ones(2), out=out))
    assert {name for name, _, _ in errors} == {"ValueError"}
