"""`Server`: a parameter server or a worker that does its work when the program calls `join`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpistrat.cluster_resolver import ClusterSpec, SimpleClusterResolver
from mpistrat.cluster_resolver.task_roles import ServerDef, make_server_def
from mpistrat.machine.notices import warn_of_no_effect
from mpistrat.parameter_server.job.joining import join_job
from mpistrat.parameter_server.strategies.coordinated_strategy import ParameterServerStrategy

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.cluster_resolver.cluster_spec import ClusterDef
    from mpistrat.parameter_server.job.job import ServerJob


class Server:
    """A parameter server, or a worker of a coordinator; `join` does its work.

    Each rank of the job (or of `comm`) makes either a `Server` or a strategy; all ranks meet in the constructors.

    Called by: the ranks that are parameter servers or workers.
    Args:
        server_or_cluster_def: the cluster: a dict such as {"ps": ["n1"], "worker": ["n2"]}, a ClusterSpec, a
            ClusterDef, or a ServerDef. MPI carries the bytes: addresses are only names.
        job_name, task_index: this rank's task, such as "ps" and 0. None takes the cluster's only job, or the job's only
            task.
        protocol, config: have no effect, and task 0 warns of it once; `server_def` contains the protocol.
        start: True meets the other ranks at once; False waits for `start()`.
        comm: the mpi4py communicator of the ranks that take part; None is all ranks.
    Attributes: server_def: the cluster and this rank's task in it.
    Raises: ValueError, TopologyError: on all ranks, if the tasks of the ranks contradict each other.

    Example, on several ranks::

        cluster = {"ps": ["a"], "chief": ["b"], "worker": ["c"]}
        server = ms.Server(cluster, "ps", 0, start=False)  # on the rank of ps 0
        server.start()   # meets the other ranks
        server.target    # "mpi://0" on rank 0
        server.join()    # serves until no rank needs the server
    """

    def __init__(
        self,
        server_or_cluster_def: dict[str, Any] | ClusterSpec | ClusterDef | ServerDef,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        task = server_or_cluster_def
        if isinstance(task, ServerDef):
            self.server_def = task
        else:
            self.server_def = make_server_def(task, job_name, task_index, protocol)
        without_effect = {"protocol": protocol, "config": config}
        for name, value in without_effect.items():
            if value is not None:
                warn_of_no_effect(
                    f"{name} of a Server",
                    "MPI carries the bytes, and the strategies on the other ranks say how they are served",
                    self.server_def.task_index,
                )
        self._comm = comm
        self._job: ServerJob | None = None
        if start:
            self.start()

    def start(self) -> None:
        """Wait for the other ranks, and join the job. Collective. A second call does nothing."""
        if self._job is not None:
            return
        task = self.server_def
        spec = ClusterSpec(task.cluster)
        resolver = SimpleClusterResolver(spec, task_type=task.job_name, task_id=task.task_index)
        self._job, self._devices = join_job(resolver, None, self._comm, None, chief=None)

    @property
    def target(self) -> str:
        """The name of this rank, such as "mpi://3"; no program connects to it.

        Raises: RuntimeError before `start`.
        """
        return f"mpi://{self._started().rpc.rank}"

    def _started(self) -> ServerJob:
        if self._job is None:
            raise RuntimeError("the server was made with start=False: call start() first")
        return self._job

    def join(self) -> None:
        """Do this rank's work, and return when no rank needs it any more.

        A parameter server serves its arrays; a worker runs the chief's functions.

        Raises: RuntimeError before `start`, for any other task, and for a worker of a cluster without a chief.
        """
        job = self._started()
        task_type = self.server_def.job_name
        if task_type == "ps":
            job.serve()
        elif task_type == "worker" and "chief" in job.roles.ranks:
            strategy = ParameterServerStrategy.of_worker(job, self._devices)
            strategy.work()
        else:
            raise RuntimeError(
                f"join(): a {task_type} has no work to join where no other rank is its chief. Make a "
                "strategy on this rank instead"
            )
