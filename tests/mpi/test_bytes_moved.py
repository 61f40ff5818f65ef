"""How much a worker has read from servers, and sent to them. The last rank serves, the others train."""

import numpy as np
from mpi4py import MPI

import mpistrat as ms

COMM = MPI.COMM_WORLD
WORKERS = max(COMM.size - 1, 1)
CLUSTER = {"worker": [f"w{i}" for i in range(WORKERS)], "ps": ["s0"]}


def test_bytes_moved() -> None:
    """What is read and sent, and no more; nothing by a rank that keeps the variables itself."""
    resolver = None
    if COMM.size > 1:
        if COMM.rank == WORKERS:
            ms.Server(CLUSTER, "ps", 0).join()
            return
        resolver = ms.cluster_resolver.SimpleClusterResolver(
            ms.cluster_resolver.ClusterSpec(CLUSTER), task_type="worker", task_id=COMM.rank
        )
    strategy = ms.compat.v1.ParameterServerStrategy(resolver)
    with strategy.scope():
        table = ms.Variable(np.zeros((100, 5), np.float32), name="table")
    first = 2000 if COMM.rank == 0 else 0  # its values are everybody's
    expected = [(0, first)]
    moved = [strategy.bytes_moved]

    table.read_value()
    moved.append(strategy.bytes_moved)
    expected.append((2000, first))
    if resolver is not None:
        table.sparse_read([3, 7])
        moved.append(strategy.bytes_moved)
        expected.append((2000 + 40, first))
    table.scatter_add(ms.IndexedSlices(np.ones((3, 5), np.float32), np.array([1, 2, 99])))
    moved.append(strategy.bytes_moved)
    expected.append((2000 + 40, first + 60 + 3 * 8))

    if resolver is None:
        expected = [(0, 0)] * len(moved)
    else:
        strategy.extended.job.done()
    assert moved == [{"pulled": pulled, "pushed": pushed} for pulled, pushed in expected]
