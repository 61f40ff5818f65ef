"""`failing.py NAME FOLDER`: how ranks fail, alone or in the same moment, with a strategy if NAME says so.

FOLDER is empty. Ranks meet there, for they may start seconds apart.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import mpistrat as ms
from mpistrat.cluster_resolver.launcher import certain_rank

name, folder = sys.argv[1], Path(sys.argv[2])
rank, size = certain_rank() or (0, 1)
if name.endswith("_with_strategy"):
    ms.MultiWorkerMirroredStrategy()
(folder / str(rank)).touch()
while len(list(folder.iterdir())) < size:
    time.sleep(0.01)


def fail(text: str) -> None:
    raise ValueError(text)


if name.startswith("all"):
    fail(f"wrong on rank {rank}")
if name.startswith("by_node"):
    fail("of the first node" if rank < size // 2 else "of the second node")
if name.startswith("two"):  # in the same place: ranks 0 and 2, and 1 and 3
    fail("an odd error" if rank % 2 else "an even error")
if name.startswith("one"):
    if rank == 1:
        fail("wrong alone")
    while True:  # holds the GIL
        sum(range(10**7))
if name.startswith("interrupted"):
    for number in range(2):
        threading.Timer(0.3 + 0.1 * number, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(60)  # here
if name == "without_mpi":
    ms.MultiWorkerMirroredStrategy()
time.sleep(60)
