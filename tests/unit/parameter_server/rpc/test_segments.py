"""Memory that others map: where it lies, when it is used again, and that it goes."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from mpistrat.parameter_server.rpc.segments import (
    Buffers,
    Mappings,
    RegionHandle,
    Segments,
    SharedRegion,
)
from support.open_files import descriptors, mapped_bytes

LARGE = 5 << 20
MEMORY = "memfd:mpistrat"

# Adds 1 to the bytes at a handle.
ADDER = """
import sys
from mpistrat.parameter_server.rpc.segments import Mappings, RegionHandle

Mappings().at(RegionHandle(*map(int, sys.argv[1:])))[...] += 1
"""


@pytest.mark.parametrize("nbytes", [1, 64, 100_000, LARGE])
def test_another_process_writes_there(nbytes: int) -> None:
    segments = Segments()
    before, region, after = segments.make(64), segments.make(nbytes), segments.make(64)
    region.memory[:] = 41
    command = [sys.executable, "-c", ADDER, *map(str, region.handle)]
    subprocess.run(command, check=True, timeout=60)
    assert (region.memory == 42).all()
    assert not before.memory.any()
    assert not after.memory.any()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 1 << 19, (1 << 20) - 1, 1 << 20, LARGE])
def test_regions_are_zeros_of_their_own_on_lines_of_their_own(nbytes: int) -> None:
    segments = Segments()
    regions = [segments.make(nbytes) for _ in range(12)]
    for number, region in enumerate(regions):
        assert len(region.memory) == nbytes == region.handle.nbytes
        assert not region.memory.any()
        assert region.memory.ctypes.data % 64 == 0 or not nbytes
        region.memory[:] = number
    mappings = Mappings()
    for number, region in enumerate(regions):
        assert (region.memory == number).all()
        assert (mappings.at(region.handle) == number).all()


def test_small_ones_share_a_file() -> None:
    segments = Segments()
    places = [segments.make(1000).handle for _ in range(50)]
    assert len({handle.inode for handle in places}) == 1


def test_memory_and_descriptors_go_with_the_last_use() -> None:
    gc.collect()
    descriptors_before, bytes_before = descriptors(MEMORY), mapped_bytes(MEMORY)
    segments, mappings = Segments(), Mappings()
    region: SharedRegion | None = segments.make(LARGE)
    small = segments.make(10).memory
    assert region is not None
    view = mappings.at(region.handle)[10:20]
    assert descriptors(MEMORY) == descriptors_before + 2
    del segments
    region = None
    gc.collect()
    assert descriptors(MEMORY) == descriptors_before + 1  # of the small one
    view[:] = 3
    assert view.tolist() == [3] * 10
    mappings.forget(os.getpid())
    del view, small
    gc.collect()
    assert descriptors(MEMORY) == descriptors_before
    assert mapped_bytes(MEMORY) == bytes_before


def test_a_descriptor_that_is_another_file_by_now() -> None:
    region = Segments().make(LARGE)
    handle = region.handle._replace(inode=region.handle.inode + 1)
    with pytest.raises(OSError, match="is another file here"):
        Mappings().at(handle)
    with pytest.raises(OSError, match="No such file"):
        Mappings().at(RegionHandle(os.getpid(), 1 << 20, 1, LARGE, 0, LARGE))


def test_buffers_are_used_again() -> None:
    buffers = Buffers()
    first = buffers.take(5000)
    second = buffers.take(5000)
    assert first.handle != second.handle
    buffers.give_back(first)
    assert buffers.take(8000) is first  # of one size class
    assert buffers.take(5000) is not second


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 22, (1 << 22) + 1, LARGE])
def test_buffers_are_large_enough(nbytes: int) -> None:
    region = Buffers().take(nbytes)
    assert len(region.memory) >= nbytes
    region.memory[:nbytes] = 1


def test_sizes_that_vary_keep_no_memory_each() -> None:
    rng = np.random.default_rng(1)
    gc.collect()
    before = mapped_bytes(MEMORY)
    buffers = Buffers()
    largest = 64 << 20
    for nbytes in rng.integers(1, largest, 300):
        buffers.give_back(buffers.take(int(nbytes)))
    assert mapped_bytes(MEMORY) - before <= 3 * largest


def test_more_large_regions_than_files_may_be_open_at_first() -> None:
    """Half of what the hard limit lets it have are more than the soft limit."""
    program = """if True:
        import os, resource
        from mpistrat.parameter_server.rpc.segments import Segments

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
        segments = Segments()
        regions = [segments.make(1 << 20) for _ in range(128)]
        assert len(os.listdir("/proc/self/fd")) > 128
        try:
            regions += [segments.make(1 << 20) for _ in range(256)]
        except OSError as error:
            print(error)
    """
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Too many open files" in found.stdout
