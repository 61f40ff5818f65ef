"""`failing.py NAME`: how ranks fail, together or alone. They import mpistrat, and build a strategy if NAME says so."""

import sys
import time

import mpistrat as ms
from mpistrat.cluster_resolver.launcher import certain_rank

name = sys.argv[1]
rank, size = certain_rank() or (0, 1)
if name.endswith("_with_strategy"):
    ms.MultiWorkerMirroredStrategy()


def fail(text: str) -> None:
    raise ValueError(text)


if name.startswith("all"):
    fail(f"wrong on rank {rank}")
if name.startswith("two"):  # in the same place: ranks 0 and 2, and 1 and 3
    fail("an odd error" if rank % 2 else "an even error")
if name.startswith("one"):
    if rank == 1:
        fail("wrong alone")
    while True:  # holds the GIL
        sum(range(10**7))
if name == "without_mpi":
    ms.MultiWorkerMirroredStrategy()
time.sleep(60)
