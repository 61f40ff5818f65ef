"""Counts to ten; told to end, it notes how far it has come and ends with 42. Takes part in no training."""

import signal
import sys
import time
from pathlib import Path

from mpistrat.cluster_resolver import MPIClusterResolver

signals: list[int] = []
signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
comm = MPIClusterResolver().comm
note = Path("note")
first = int(note.read_text()) if note.exists() else 0
for count in range(first, 10):
    line = f"rank {comm.Get_rank()} counts {count}"
    print(line + "\n", end="", flush=True)
    time.sleep(0.05 if note.exists() else 2)
    if comm.allreduce(len(signals)):
        end = time.monotonic() + 20
        while not signals and time.monotonic() < end:
            time.sleep(0.05)  # the signal reaches one rank before the other
        print(f"rank {comm.Get_rank()} heard {len(signals)}\n", end="", flush=True)
        if comm.Get_rank() == 0:
            note.write_text(str(count + 1))
        comm.Barrier()
        sys.exit(42)
