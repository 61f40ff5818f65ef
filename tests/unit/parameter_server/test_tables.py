"""Arrays that another process reads in place while the server writes them: never torn, never for ever."""

import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import torch

from mpistrat.indexed_slices import IndexedSlices
from mpistrat.parameter_server.protocol.messages import TensorSpec
from mpistrat.parameter_server.protocol.tables import MappedTable, Table
from mpistrat.parameter_server.rpc.segments import Mappings, RegionHandle, Segments

SIZE = 200_000

# Serves a table of which all numbers are equal, and changes it all the time; its pauses are shorter than a copy takes.
WRITER = textwrap.dedent(
    """
    import sys, time
    import numpy as np
    from mpistrat.parameter_server.protocol.messages import TensorSpec
    from mpistrat.parameter_server.rpc.segments import Segments
    from mpistrat.parameter_server.protocol.tables import Table

    size, pause = int(sys.argv[1]), float(sys.argv[2])
    table = Table("t", TensorSpec((size,), "int64", False), Segments())
    print(*table.handle, flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with table.writing() as array:
            array += 1
        until = time.perf_counter() + pause
        while time.perf_counter() < until:
            pass
    """
)


def table_of(array) -> Table:
    table = Table("t", TensorSpec.of(array), Segments())
    table.update("assign", array)
    return table


def mapped(table: Table) -> MappedTable:
    return MappedTable(table.spec, Mappings().at(table.handle))


@pytest.fixture
def written_table():
    """A function of a pause: a table in another process, which changes it and pauses so long."""
    processes = []

    def start(pause: float) -> MappedTable:
        command = [sys.executable, "-c", WRITER, str(SIZE), str(pause)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        handle = RegionHandle(*map(int, process.stdout.readline().split()))
        return MappedTable(TensorSpec((SIZE,), "int64", False), Mappings().at(handle))

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("pause", [0.0, 0.0002, 0.002])
def test_no_reader_sees_half_of_an_update(written_table, pause: float) -> None:
    table = written_table(pause)
    out = np.empty(SIZE, np.int64)
    rows = np.arange(0, SIZE, 3)
    seen, missed, end = [], 0, time.monotonic() + 3
    while time.monotonic() < end:
        if table.copy_to(out):
            assert out.min() == out.max()
            seen.append(int(out[0]))
        else:
            missed += 1
        found = table.rows(rows)
        if found is not None:
            assert found.min() == found.max()
            seen.append(int(found[0]))
    assert seen == sorted(seen)  # time does not go back
    if pause > 0.001:
        assert len(set(seen)) > 1
    else:
        assert seen or missed  # who never gets a turn is told so


def test_a_server_that_stands_still_in_an_update_holds_nobody_up() -> None:
    table = table_of(np.zeros(5))
    reader = mapped(table)
    out = np.empty(5)
    with table.writing() as array:
        array[0] = 1
        begin = time.monotonic()
        assert not reader.copy_to(out)
        assert reader.rows(np.array([0])) is None
        assert time.monotonic() - begin < 30
    assert reader.copy_to(out)
    assert out[0] == 1


def test_an_update_that_fails_lets_readers_read() -> None:
    table = table_of(np.zeros(3))
    with pytest.raises(ValueError, match="broadcast"):
        table.update("assign_add", np.zeros(4))
    out = np.empty(3)
    assert mapped(table).copy_to(out)
    assert not out.any()
    assert table.updates == mapped(table).updates == 1  # the first value


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_updates(make) -> None:
    table = table_of(make(np.zeros((3, 2), np.float32)))
    reader = mapped(table)
    table.update("assign", make(np.full((3, 2), 4, np.float32)))
    table.update("assign_add", make(np.ones((3, 2), np.float32)))
    table.update("assign_sub", make(np.full((3, 2), 2, np.float32)))
    rows = IndexedSlices(make(np.ones((3, 2), np.float32)), make(np.array([2, 0, 2])))
    table.update("scatter_add", rows)
    table.update("scatter_update", IndexedSlices(rows.values[:1], rows.indices[1:2]))
    expected = [[1, 1], [3, 3], [5, 5]]
    out = make(np.empty((3, 2), np.float32))
    assert reader.copy_to(out)
    assert out.tolist() == expected
    assert reader.rows(np.array([2, 0])).tolist() == [expected[2], expected[0]]
    assert table.rows(np.array([1])).tolist() == [expected[1]]
    assert reader.updates == table.updates == 6


def test_what_was_read_is_a_copy() -> None:
    table = table_of(np.zeros(3))
    rows, found = table.rows(np.array([0])), mapped(table).rows(np.array([0]))
    table.update("assign_add", np.ones(3))
    assert rows[0] == found[0] == 0


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)], ids=str)
def test_arrays_of_one_number_or_none(shape) -> None:
    for array in (np.ones(shape, np.float32), torch.ones(shape, dtype=torch.bfloat16)):
        table = table_of(array)
        table.update("assign_add", array)
        out = array.copy() if isinstance(array, np.ndarray) else array.clone()
        assert mapped(table).copy_to(out)
        assert bool((out == 2).all())
