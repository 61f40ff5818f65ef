"""`mpistrat run`: runs a program that was written for torchrun, or for one process, on ranks of MPI."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import runpy
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.torchrun import have_accelerate_use_cpus, set_torchrun_environment
from mpistrat.liveness.call_site import call_site
from mpistrat.liveness.ending.program_exit import remember_raised
from mpistrat.liveness.ending.start_deadline import start_deadline
from mpistrat.liveness.processes import cpu_seconds, text_in
from mpistrat.machine.cpu_share import intra_op_threads, users_threads
from mpistrat.machine.notices import tell
from mpistrat.settings import stall_seconds
from mpistrat.torch_distributed import default_group
from mpistrat.torch_distributed.next_group import has_default_group

_IDLE = 0.1  # of a core, for all processes together


def run_program(
    program: str, arguments: Sequence[str], *, is_module: bool, keeps_backend: bool = False
) -> NoReturn:
    """Run a program as `__main__`, as `python` or `python -m` does, with the environment variables of torchrun.

    Called by: every rank, from `mpistrat run`.
    Args:
        program: path of the script, or name of the module.
        arguments: the program's command-line arguments.
        is_module: whether `program` is the name of a module.
        keeps_backend: whether the program's process groups use the backends that it names, and not ours.
    Raises: SystemExit when the program has ended; or the program's own exception. It never returns.
    """
    _share_cores()
    # After _share_cores, because torch reads OMP_NUM_THREADS when it is imported.
    import torch

    from mpistrat.torch_distributed.default_backend import replace_functions
    from mpistrat.torch_distributed.rendezvous import base, start_agent_store

    default_group.make_known_to_torch()
    ranks = base()
    set_torchrun_environment(ranks.topology, *start_agent_store(ranks))
    # Ask without starting the accelerator: the program may still set CUDA_VISIBLE_DEVICES, or fork.
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or not torch.get_device_module(built_for).device_count():
        have_accelerate_use_cpus()
    replace_functions(keeps_backend=keeps_backend)
    default_group.with_every_strategy = not keeps_backend
    if ranks.rank == 0:
        look_for_spawned_ranks()
    sys.argv = [program, *arguments]
    try:
        _run_as_main(program, is_module)
    except SystemExit as error:
        remember_raised(error)
        raise
    except BaseException as error:
        _show_only_the_program(error.__traceback__)
        raise
    raise SystemExit  # sys.exit would count as a call of the program's


def _run_as_main(program: str, is_module: bool) -> None:
    """Run the program as `python` does: a script, a module, an archive or a folder with `__main__.py`.

    The program's module stays in `sys.modules["__main__"]`, for exit handlers and threads that run after its last line.
    """
    path = os.path.join(os.getcwd(), program)
    if is_module:
        _search_first(os.getcwd())
        main, code = _module(program)
        sys.argv[0] = main.__spec__.origin
    elif pkgutil.get_importer(path) is not None:  # an archive, or a folder
        _search_first(path, although_safe=True)
        del sys.modules["__main__"]  # the importer would take this module for the program's
        main, code = _module("__main__")
    else:
        _search_first(os.path.dirname(os.path.realpath(path)))
        main, code = _script(path)
    main.__name__ = "__main__"
    # Processes that the program spawns look for its classes in `__mp_main__`.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    exec(code, vars(main))


def _search_first(place: str, *, although_safe: bool = False) -> None:
    """Put `place` first in `sys.path`, instead of the folder of the command `mpistrat`.

    With -P or PYTHONSAFEPATH (Python 3.11), Python has put no folder first, so nothing is replaced.
    Args:
        place: the folder or archive.
        although_safe: whether to put `place` first also with -P or PYTHONSAFEPATH.
    """
    safe = bool(getattr(sys.flags, "safe_path", False))
    if although_safe or not safe:
        sys.path[: 1 - safe] = [place]


def _module(name: str) -> tuple[Any, types.CodeType]:
    """Return a new module object for running the module `name`, and the module's code."""
    _, spec, code = runpy._get_module_details(name)  # type: ignore[attr-defined]
    return importlib.util.module_from_spec(spec), code


def _script(path: str) -> tuple[types.ModuleType, types.CodeType]:
    """Return a new module object for running the file `path`, and its code. The file may be a .pyc."""
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    source = loader.get_data(path)
    code = pkgutil.read_code(io.BytesIO(source))
    if code is None:
        code = compile(source, path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    return main, code


@start_deadline("the start of `mpistrat run`")
def _share_cores() -> None:
    """Set OMP_NUM_THREADS to this rank's share of the node's cores, unless the user has set it. Collective."""
    comm = MPIClusterResolver().comm
    if comm is None or comm.Get_size() == 1:
        return
    topology = MPIClusterResolver(comm).topology()
    affinity = os.sched_getaffinity(0)
    affinities = comm.allgather((topology.node, affinity))
    if not users_threads():
        local = [cpus for node, cpus in affinities if node == topology.node]
        os.environ["OMP_NUM_THREADS"] = str(intra_op_threads(affinity, local))


def _show_only_the_program(part: types.TracebackType | None) -> None:
    """Have Python print the exception that ends this process without the first frames, of this file and of runpy.

    Replaces `sys.excepthook`. Args: part: the traceback of the exception.
    """
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while part is not None and part.tb_frame.f_code.co_filename in ours:
        part = part.tb_next
    hook = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        hook(kind, error.with_traceback(part), part)

    sys.excepthook = excepthook


def look_for_spawned_ranks() -> None:
    """Start a thread that gives a notice if the program starts ranks by `torch.multiprocessing.spawn`.

    Such ranks wait forever. Each connects to a store at the program's address, and no process opens that store.

    Nothing is started if MPISTRAT_STALL_SECONDS is 0. Called by: rank 0.
    """
    if seconds := stall_seconds():
        threading.Thread(target=_look, args=(seconds,), name="mpistrat spawn", daemon=True).start()


def _look(seconds: float) -> None:
    """Print the notice when the main thread has waited `seconds` for processes that it started, and they are idle.

    Returns after the notice, or when torch has a default group. Idle: together they use less than a tenth of a core.
    """
    from torch.multiprocessing.spawn import ProcessContext

    # These functions wait for a program's own processes.
    joins = {BaseProcess.join.__code__, ProcessContext.join.__code__}
    since = time.monotonic()
    used = 0.0
    pause = seconds / 4
    while not has_default_group():
        time.sleep(pause)
        now = time.monotonic()
        before = used
        used = _used_by_children()
        are_idle = used - before < _IDLE * pause
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        if joins.isdisjoint(each.f_code for each, _ in traceback.walk_stack(frame)):
            since = now
        elif now - since >= seconds and are_idle:
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
