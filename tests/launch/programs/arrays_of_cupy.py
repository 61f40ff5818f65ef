"""CuPy's arrays of several ranks by its NCCL: CuPy's own, or where there is no GPU the stand-in for it.

By the stand-in, too, ranks share a GPU where each has a host's name of its own for NCCL.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms

sys.path.insert(0, str(Path(__file__).parents[2]))

from support import accelerator, stand_in_cupy

WORLD = MPI.COMM_WORLD
RANK, SIZE, LAST = WORLD.rank, WORLD.size, WORLD.size - 1
if accelerator.SIMULATED:
    own_gpu = 0 if "NCCL_HOSTID" in os.environ else RANK
    stand_in_cupy.install(pytest.MonkeyPatch(), [f"0000:0{own_gpu}:00.0"])
else:
    import torch  # noqa: F401 (which brings the NCCL that CuPy finds)
import cupy  # noqa: E402

strategy = ms.MultiWorkerMirroredStrategy()
communicator = strategy.extended.communicator
for dtype in ("float32", "int64", "float16", "complex64"):
    for length in (1, 1000, 1 << 18):
        ranks = [(np.arange(length) % 5 + rank).astype(dtype) for rank in range(SIZE)]
        buffer = cupy.asarray(ranks[RANK].copy())
        communicator.all_reduce(buffer)
        np.testing.assert_array_equal(buffer.get(), sum(ranks))
        buffer = cupy.asarray(ranks[RANK].copy())
        communicator.broadcast(buffer, LAST)
        np.testing.assert_array_equal(buffer.get(), ranks[LAST])
    parts = communicator.all_gather(cupy.asarray(np.full((RANK + 1, 2), RANK, dtype)))
    assert [part.shape for part in parts] == [(rank + 1, 2) for rank in range(SIZE)]
    assert all((part.get() == rank).all() for rank, part in enumerate(parts))
assert "through NCCL" in communicator.explain(), communicator.explain()
if RANK == 0:
    print("done arrays of CuPy", flush=True)
