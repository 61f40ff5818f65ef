"""A notice for programs that start ranks by `torch.multiprocessing.spawn`, though `mpistrat run` has started ranks.

Such ranks wait forever. Each connects to a store at the program's address, and no process opens that store.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from multiprocessing.process import BaseProcess

from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.processes import cpu_seconds, text_in
from mpistrat.machine.notices import tell
from mpistrat.settings import stall_seconds
from mpistrat.torch_distributed.next_group import has_default_group

_IDLE = 0.1  # of a core, for all processes together


def look_for_spawned_ranks() -> None:
    """Start the thread that gives the notice; do nothing if MPISTRAT_STALL_SECONDS is 0. Called by: rank 0."""
    if seconds := stall_seconds():
        threading.Thread(target=_look, args=(seconds,), name="mpistrat spawn", daemon=True).start()


def _look(seconds: float) -> None:
    """Print the notice when the main thread has waited `seconds` for processes that it started, and they are idle.

    Returns after the notice, or when torch has a default group. Idle: together they use less than a tenth of a core.
    """
    from torch.multiprocessing.spawn import ProcessContext

    # These functions wait for a program's own processes.
    joins = {BaseProcess.join.__code__, ProcessContext.join.__code__}
    since, used, pause = time.monotonic(), 0.0, seconds / 4
    while not has_default_group():
        time.sleep(pause)
        now, before, used = time.monotonic(), used, _used_by_children()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        if joins.isdisjoint(each.f_code for each, _ in traceback.walk_stack(frame)):
            since = now
        elif now - since >= seconds and used - before < _IDLE * pause:
            tell(
                f"rank 0 has waited {now - since:.0f} s for processes that it started, at {call_site(frame)}, and "
                "these are idle. Under `mpistrat run` the ranks are started already, by mpiexec, mpirun or srun. "
                "Call the function of torch.multiprocessing.spawn once in each rank, with RANK and WORLD_SIZE from the "
                "environment; or start the program with `python`, without `mpistrat run`"
            )
            return


def _used_by_children() -> float:
    """Return the CPU seconds of the live processes that the main thread has started; 0.0 if /proc does not tell."""
    children = text_in(f"/proc/self/task/{os.getpid()}/children").split()
    return sum(cpu_seconds(int(pid)) for pid in children)
