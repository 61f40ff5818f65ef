"""Under `mpistrat run`: tells of a program that starts ranks of its own, as by `torch.multiprocessing.spawn`.

Those wait for ever: each is a client of a store at the address that the program names, where nobody has one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback

from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.processes import cpu_seconds
from mpistrat.machine.notices import tell
from mpistrat.settings import stall_seconds
from mpistrat.torch_distributed.default_group import has_default_group

# They have functions `join`, which wait for a program's processes.
_JOIN = "multiprocessing/process.py", "torch/multiprocessing/spawn.py"
_IDLE = 0.1  # of a core, all of the processes together


def look_for_own_ranks() -> None:
    """From now on, in a thread. Called by: the main thread of rank 0."""
    if seconds := stall_seconds():
        threading.Thread(target=_look, args=(seconds,), name="mpistrat own", daemon=True).start()


def _look(seconds: float) -> None:
    """Until this process is in a group, or has waited so long for processes that do nothing."""
    since, used, pause = time.monotonic(), 0.0, seconds / 4
    while not has_default_group():
        time.sleep(pause)
        now, before, used = time.monotonic(), used, _used_by_children()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        codes = (each.f_code for each, _ in traceback.walk_stack(frame))
        if not any(c.co_name == "join" and c.co_filename.endswith(_JOIN) for c in codes):
            since = now
        elif now - since >= seconds and used - before < _IDLE * pause:
            tell(
                f"rank 0 has waited {now - since:.0f} s for processes that it started, at {call_site(frame)}, and they "
                "do nothing. Under `mpistrat run` the ranks are started already, by mpiexec, mpirun or srun. In place "
                "of torch.multiprocessing.spawn, call its function once in each rank, with RANK and WORLD_SIZE of the "
                "environment; or start the program with `python`, without mpiexec and `mpistrat run`"
            )
            return


def _used_by_children() -> float:
    """Seconds of CPUs, by processes that the main thread has started and not waited for."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return sum(map(cpu_seconds, map(int, file.read().split())))
    return 0.0
