"""The default resolver: it asks MPI for the ranks. MPI is loaded and started on first use, not on import."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from typing import Any

from mpistrat.cluster_resolver import launcher
from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.errors import TopologyError
from mpistrat.liveness.ending import rank_end
from mpistrat.liveness.ending.start_deadline import init_deadline, start_deadline
from mpistrat.liveness.observer import observation
from mpistrat.liveness.processes import text_in
from mpistrat.machine.notices import say
from mpistrat.settings import Environment, rank_pid
from mpistrat.topology import Topology

# Exit code of a multiprocessing worker that would have started MPI while it imported the main program.
EXIT_CODE_OF_REFUSED_WORKER = 78  # EX_CONFIG of sysexits.h
GUARD_PROGRAM = 'Workers import your program: put what it does under `if __name__ == "__main__":`'

_started: Any = None  # mpi4py.MPI, once it is initialized and agrees with the launcher
# The key of the MPI attribute that holds a communicator's Topology.
_kept_with_comm: int | None = None


class MPIClusterResolver(ClusterResolver):
    """Finds the ranks of an MPI communicator; each is a worker. Without MPI and without a launcher there is one rank.

    The constructor starts nothing. The first use of another member initializes MPI, if the program has not. The first
    `topology()` for a communicator is a collective call on this communicator.

    Called by: every rank of `comm`.
    Args: comm: an mpi4py intracommunicator; None is all ranks (MPI.COMM_WORLD).
    Raises: on first use, TopologyError if the launcher and the MPI library contradict each other, or MPI was finalized;
        TypeError if `comm` is no intracommunicator; ValueError if `comm` is MPI.COMM_NULL.

    Example:
        >>> resolver = ms.cluster_resolver.MPIClusterResolver()
        >>> topology, comm = resolver.topology(), resolver.comm
        >>> topology.rank, topology.size
        (0, 1)
        >>> resolver.cluster_spec().num_tasks("worker"), resolver.master()
        (1, '')
    """

    launcher = "mpi"

    def __init__(self, comm: Any = None, *, rpc_layer: str | None = None, environment: str = ""):
        super().__init__(task_type="worker", rpc_layer=rpc_layer, environment=environment)
        self._comm = comm

    @property
    def comm(self) -> Any:
        """The mpi4py communicator of the ranks; None for a single rank without MPI. The first use starts MPI."""
        mpi = start_mpi()
        if self._comm is not None:
            _check_comm(mpi, self._comm)
            return self._comm
        return None if mpi is None else mpi.COMM_WORLD

    def topology(self) -> Topology:
        """Return the `Topology` of the communicator: this process's rank, and the node of each rank.

        Called by: every rank. The first call for a communicator is collective; later calls communicate nothing.
        Raises: TopologyError if MPI disagrees with Slurm about the nodes, or with the launcher about the ranks.
        """
        return self._topology

    @functools.cached_property
    def _topology(self) -> Topology:
        """The topology of `comm`, kept as an MPI attribute of `comm`.

        The first use for `comm` is collective. Later ones, also by another resolver, read the attribute, so they do
        not wait for other ranks.
        """
        global _kept_with_comm
        comm = self.comm
        if comm is None:
            return Topology.single()
        mpi = importlib.import_module("mpi4py.MPI")
        if _kept_with_comm is None:
            _kept_with_comm = mpi.Comm.Create_keyval()
        topology: Topology | None = comm.Get_attr(_kept_with_comm)
        if topology is None:
            topology = _ask_ranks_of(comm, mpi)
            observation.remember_mappings()  # MPI's first communication has made its mappings
            comm.Set_attr(_kept_with_comm, topology)
        return topology

    def cluster_spec(self) -> ClusterSpec:
        """Return a cluster with one worker per rank. A worker's address is the name of its node, without a port."""
        topology = self.topology()
        hosts = topology.hosts or ("localhost",)
        return ClusterSpec({"worker": [hosts[node] for node in topology.node_of_rank]})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the name of the node where a task's rank runs; '' if `task_type` or `task_id` is None.

        Raises: ValueError if there is no such task.
        """
        if None in (task_type, task_id):
            return ""
        return super().master(task_type, task_id, rpc_layer)

    def _get(self, name: str) -> Any:
        return self.topology().rank if name == "task_id" else super()._get(name)

    def _set(self, name: str, value: Any) -> None:
        if name == "task_id":
            raise RuntimeError(
                "the task_id of an MPIClusterResolver is this process's rank; it cannot be set"
            )
        super()._set(name, value)


def start_mpi() -> Any:
    """Initialize MPI if the program has not, and check that MPI and the launcher agree. Later calls do nothing.

    Removes from os.environ the variables that would make a child process join this job.
    Called by: every rank, because MPI_Init is collective; by `MPIClusterResolver` at its first use.
    Returns: the module mpi4py.MPI; None for a single rank without MPI.
    Raises: TopologyError if the launcher and the MPI library contradict each other, or if MPI was finalized;
        RuntimeError in a multiprocessing child of a rank.
    """
    global _started
    _refuse_in_worker()
    environ = _environment()
    mpi, why_not = import_mpi()
    if mpi is None:
        launcher.check_alone(environ, "; ".join(why_not))
        _check_single_rank()
        return None
    if mpi.Is_finalized():
        raise TopologyError(
            "MPI was finalized in this process: build strategies before MPI_Finalize"
        )
    if _started:
        return mpi
    version = mpi.Get_library_version()
    path = library_path()
    if not mpi.Is_initialized():
        launcher.check_library(environ, version, path)
        _initialize(mpi, launcher.read_claim(environ, launcher.library_family(version)))
    world = mpi.COMM_WORLD
    launcher.check_world(environ, version, world.Get_size(), world.Get_rank(), path)
    if world.Get_size() == 1:
        _check_single_rank(launcher.read_claim(environ))
    misleading = list(filter(launcher.joins_job, os.environ))
    if launcher.describes_daemons(environ):
        misleading += launcher.SLURM_STEP[:2]
    for name in misleading:
        os.environ.pop(name, None)
    os.environ[rank_pid.name] = str(os.getpid())
    _started = mpi
    return mpi


def _environment() -> Environment:
    """Return os.environ; in a child process of a rank, a copy without the variables that say the parent's rank."""
    is_child = rank_pid() and not _started
    return launcher.without_inherited(os.environ) if is_child else os.environ


def _check_single_rank(claim: launcher.LauncherClaim | None = None) -> None:
    if not rank_pid():  # a child of a rank inherits the variables that `mpistrat run` has set
        launcher.check_torchrun(os.environ)
    if claim is None and (warning := launcher.left_alone(os.environ)):
        warnings.warn(warning, RuntimeWarning, stacklevel=2)


def _refuse_in_worker() -> None:
    """Raise RuntimeError in a multiprocessing child of a rank, such as a DataLoader's worker process.

    The child is no rank, so MPI_Init would wait for ranks that never come. A child that is still importing the main
    program exits with code 78 instead. In any other process, do nothing.
    """
    of_rank = rank_pid()
    own = str(os.getpid())
    if of_rank in ("", own):
        return
    import multiprocessing  # imported here, because only a child of a rank needs it

    text = (
        f"MPI was to be started in a worker process (pid {own}) of a rank (pid {of_rank}), where no "
        f"strategy can be built. {GUARD_PROGRAM}"
    )
    if multiprocessing.parent_process() is not None:
        raise RuntimeError(text)
    # While a child imports the main program, parent_process() is still None.
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # tracebacks of many workers would hide the text
        rank, _ = launcher.certain_rank() or (0, 1)
        if rank == 0 and process.name.endswith("-1"):
            say(f"mpistrat: {text}\n")
        os._exit(EXIT_CODE_OF_REFUSED_WORKER)


def import_mpi() -> tuple[Any, list[str]]:
    """Import mpi4py.MPI without initializing MPI.

    Returns: (the module, []) on success. (None, the lines of the error's text) if mpi4py or its MPI library cannot be
        loaded.
    """
    try:
        if "mpi4py.MPI" not in sys.modules:
            rc = importlib.import_module("mpi4py").rc
            rc.initialize = False  # so that the library's name can be checked before MPI_Init
            if rc.finalize is None:
                rc.finalize = True
        return importlib.import_module("mpi4py.MPI"), []
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError when no libmpi loads
        return None, str(error).splitlines()


def _initialize(mpi: Any, claim: launcher.LauncherClaim | None) -> None:
    rc = importlib.import_module("mpi4py").rc
    level_name = rc.thread_level.upper() if rc.threads else "SINGLE"
    level = getattr(mpi, f"THREAD_{level_name}")
    rank = None if claim is None else claim.rank
    size = 1 if claim is None else claim.size
    rank_end.begin()  # the launcher's variables may have been missing when mpistrat was imported
    with init_deadline(rank=rank, size=size), warnings.catch_warnings():
        # mpi4py guesses a mismatch from PMI_SIZE; check_world finds it for certain
        warnings.filterwarnings("ignore", "suspicious MPI execution environment", RuntimeWarning)
        mpi.Init_thread(level)


def _check_comm(mpi: Any, comm: Any) -> None:
    # In mpi4py, COMM_NULL is no Intracomm, so it is checked first
    if mpi is not None and isinstance(comm, mpi.Comm) and comm == mpi.COMM_NULL:
        raise ValueError(
            f"comm is MPI.COMM_NULL on rank {mpi.COMM_WORLD.Get_rank()} of the world: this rank is not in the "
            f"communicator; only its members may build the strategy"
        )
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        raise TypeError(f"comm must be an mpi4py intracommunicator, got {comm!r}")


def _ask_ranks_of(comm: Any, mpi: Any) -> Topology:
    rank = comm.Get_rank()
    size = comm.Get_size()
    with start_deadline("the first collective call on this communicator", rank=rank, size=size):
        node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=rank)
        leader = node.bcast(rank, root=0)
        node.Free()
        name = os.environ.get(launcher.NODE_NAME, "")
        host = name or mpi.Get_processor_name()
        by_rank = comm.allgather((leader, name, host))
    leaders, names, hosts = zip(*by_rank, strict=True)
    for other, (leader, name) in enumerate(zip(leaders, names, strict=True)):
        if name != names[leader]:
            raise TopologyError(
                f"MPI says that ranks {leader} and {other} share a node, but Slurm has started them on "
                f"{names[leader]} and {name}. `srun --mpi=pmi2` misleads MPICH if a heterogeneous job's "
                f"components are not in the order of their nodes' names: reorder them, or use mpirun."
            )
    return Topology.from_lowest_ranks(rank, leaders, hosts, "mpi")


def library_path() -> str:
    """Return the path of the loaded libmpi; '' if no libmpi is loaded, or if /proc/self/maps cannot be read."""
    for line in text_in("/proc/self/maps").splitlines():
        if "/libmpi" in line:
            return line.split(maxsplit=5)[-1].strip()
    return ""
