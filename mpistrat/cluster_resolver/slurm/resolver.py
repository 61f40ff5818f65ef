"""A resolver for the tasks of a Slurm step. It reads the variables that srun sets."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import NamedTuple

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.launcher import NODE_NAME, describes_daemons
from mpistrat.cluster_resolver.slurm.hostlist import expand_hostlist, expand_tasks_per_node
from mpistrat.errors import TopologyError
from mpistrat.machine.gpus import VISIBLE_DEVICES, visible_gpus
from mpistrat.settings import Environment
from mpistrat.topology import Topology

RANK = "SLURM_PROCID"  # "3"
NUM_TASKS = "SLURM_STEP_NUM_TASKS"  # "5"
NODE_LIST = "SLURM_STEP_NODELIST"  # "n[9-11],a1", in the order of Slurm's node numbers
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # "2(x2),1", in the order of NODE_LIST
# "block", "cyclic", "plane", "plane=2", "cyclic:block", "arbitrary"
DISTRIBUTION = "SLURM_DISTRIBUTION"
PLANE_SIZE = "SLURM_DIST_PLANESIZE"  # "2", with the distribution "plane"
ARBITRARY_LIST = "SLURM_ARBITRARY_NODELIST"  # "n9,n9,n10": the host of every task, with the distribution "arbitrary"
NODE_ID = "SLURM_NODEID"  # "1": the place of this task's node in NODE_LIST; a cross-check
LOCAL_ID = "SLURM_LOCALID"  # "0": this task's number among its node's tasks; a cross-check
TASKS_OF_NODE = "SLURM_GTIDS"  # "1,4": the tasks on this task's node; a cross-check
COMPONENTS = "SLURM_HET_SIZE"  # "2": components of a heterogeneous job
COMPONENT_NODES = "SLURM_JOB_NODELIST_HET_GROUP_{}"  # "n[9-11]", for each component
GPUS_PER_TASK = "SLURM_GPUS_PER_TASK"  # "1", "a100:2": Slurm has bound each task to its GPUs
GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"  # "4": GPUs of the step on this node; a task that sees fewer has been bound to them

_Tasks = list[tuple[str, int]]  # (host, number of tasks) of some of the step's nodes


class SlurmClusterResolver(ClusterResolver):
    """Finds the tasks of this Slurm step (of one srun), from the variables that srun sets.

    `task_type` and `task_id` are None, and `master()` is '', until `cluster_spec()` has been called.

    Args:
        jobs: number of tasks of each type; None makes all tasks workers. Types get ranks in alphabetical order:
            {"worker": 3, "ps": 1} makes rank 0 the ps.
        port_base: port of the first task of each node; the next tasks of the node have the next ports.
        gpus_per_node: number of GPUs of each node; None means the GPUs in CUDA_VISIBLE_DEVICES, or of nvidia-smi.
        gpus_per_task: number of GPUs of each task; None splits the node's GPUs evenly.
        tasks_per_node: {host: number of tasks}, or one number for every host; None means Slurm's numbers.
        auto_set_gpu: whether `cluster_spec` sets CUDA_VISIBLE_DEVICES to this task's GPUs. The variable stays if the
            task has no GPU, and also (without `gpus_per_node` and `gpus_per_task`) if Slurm has bound the task to its
            GPUs.
        environ: a mapping to read, and to set CUDA_VISIBLE_DEVICES in, instead of os.environ.
    Raises: TopologyError if a variable is missing, cannot be read, or contradicts another variable or an argument, or
        if mpirun has started this process in a Slurm job; ValueError or TypeError if an argument is no number, or no
        dict of names to numbers.

    Example:
        >>> step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
        >>> step["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
        >>> resolver = ms.cluster_resolver.SlurmClusterResolver(environ=step)
        >>> resolver.cluster_spec(), resolver.get_task_info(), resolver.master()
        (ClusterSpec({'worker': ['n1:8888', 'n2:8888']}), ('worker', 1), 'grpc://n2:8888')

    Example, under Slurm::

        resolver = ms.cluster_resolver.SlurmClusterResolver(gpus_per_node=4)
        print(resolver.topology().rank, resolver.num_accelerators())
        strategy = ms.MultiWorkerMirroredStrategy(resolver)
    """

    launcher = "slurm"

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | str | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ):
        super().__init__(rpc_layer=rpc_layer)
        self._environ = os.environ if environ is None else environ
        if describes_daemons(self._environ):
            raise TopologyError(
                f"the Slurm variables ({self._shown(RANK, NUM_TASKS)}) describe what mpirun starts ranks with, its "
                f"daemons, not the ranks: MPIClusterResolver asks MPI instead"
            )
        self._rank = self._number(RANK)
        if jobs is None:
            jobs = {"worker": self._number(NUM_TASKS)}
        self._jobs = _counts("jobs", jobs)
        self._port_base = port_base
        self._places = self._place(self._tasks_of_nodes(tasks_per_node))
        self._check_own_place()
        self._auto_set_gpu = auto_set_gpu
        asked = None in (gpus_per_node, gpus_per_task) or VISIBLE_DEVICES in self._environ
        self._visible = visible_gpus(self._environ) if asked else ()
        self._gpus_per_task = self._share_gpus(gpus_per_node, gpus_per_task)

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's tasks, and set this resolver's `task_type` and `task_id`.

        With `auto_set_gpu`, also set CUDA_VISIBLE_DEVICES to the ids of this task's GPUs, if the task has any.
        """
        cluster: dict[str, list[str]] = {}
        first = 0
        for job, count in sorted(self._jobs.items()):
            if first <= self._rank < first + count:
                self.task_type = job
                self.task_id = self._rank - first
            cluster[job] = [
                f"{place.host}:{self._port_base + place.local_rank}"
                for place in self._places[first : first + count]
            ]
            first += count
        if self._auto_set_gpu and self._gpus_per_task:
            self._environ[VISIBLE_DEVICES] = ",".join(self._own_gpus())
        return ClusterSpec(cluster)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return (task_type, task_id); (None, None) before `cluster_spec()` has been called."""
        return self.task_type, self.task_id

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this task, such as "grpc://n1:8888".

        Returns: '' if no task is given and `cluster_spec()` has not been called.
        Raises: ValueError if the given task is not in the cluster.
        """
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return {"GPU": number of GPUs of each task}."""
        return {"GPU": self._gpus_per_task}

    def topology(self) -> Topology:
        """Return the `Topology` of all tasks of the step. Every task is a rank, whatever its type."""
        hosts = [place.host for place in self._places]
        return Topology.from_hosts(self._rank, hosts, self.launcher)

    def _place(self, tasks: _Tasks) -> list[TaskPlacement]:
        total = sum(count for _, count in tasks)
        wanted = sum(self._jobs.values())
        if wanted != total:
            step = self._shown(NODE_LIST, TASKS_PER_NODE, NUM_TASKS)
            raise TopologyError(
                f"the jobs {self._jobs} have {wanted} tasks, but the step has {total} ({step}): ask srun for as many "
                f"tasks as the jobs have"
            )
        distribution = self._environ.get(DISTRIBUTION, "block")
        if distribution == "plane" and PLANE_SIZE in self._environ:
            distribution = f"plane={self._environ[PLANE_SIZE]}"
        host_of_task = _hosts_in(self._environ, ARBITRARY_LIST)
        places: list[TaskPlacement] = []
        nodes = 0
        for component in self._components(tasks):
            dealt = place_tasks(component, distribution, host_of_task)
            places += [place._replace(node=nodes + place.node) for place in dealt]
            nodes += len(component)
        return places

    def _components(self, tasks: _Tasks) -> list[_Tasks]:
        """Split the step's nodes into the components of a heterogeneous job, and return the components in order.

        Slurm numbers the tasks of component 0 first. The step's node list is sorted over all components, so it does not
        show this order.
        Args: tasks: (host, number of tasks) of each node of the step.
        Returns: for each component with nodes in the step, a list of its nodes, in the order of `tasks`; outside a
            heterogeneous job, a list with `tasks` alone.
        Raises: TopologyError if no variable says the nodes of each component.
        """
        if self._number(COMPONENTS, "1") <= 1 or len(tasks) == 1:
            return [tasks]
        hosts = hosts_of_components(self._environ)
        components = [[task for task in tasks if task[0] in listed] for listed in hosts]
        if sum(len(component) for component in components) != len(tasks):
            names = [COMPONENT_NODES.format(number) for number in range(len(hosts))]
            raise TopologyError(
                f"this step may be one of several components ({self._shown(COMPONENTS, NODE_LIST, *names)}), and "
                f"which nodes belong to which is not told: submit the job with sbatch or salloc, which set "
                f"{COMPONENT_NODES.format(0)} and so on; or let MPIClusterResolver ask MPI"
            )
        return [component for component in components if component]

    def _tasks_of_nodes(self, tasks_per_node: int | str | Mapping[str, int] | None) -> _Tasks:
        hosts = _hosts_in(self._environ, NODE_LIST)
        if isinstance(tasks_per_node, Mapping):
            counts = _counts("tasks_per_node", tasks_per_node)
            order = hosts.index if set(counts) <= set(hosts) else _natural
            return sorted(counts.items(), key=lambda item: order(item[0]))
        self._variable(NODE_LIST)
        if tasks_per_node is not None:
            return [(host, _count("tasks_per_node", tasks_per_node)) for host in hosts]
        try:
            tasks = expand_tasks_per_node(self._variable(TASKS_PER_NODE))
        except ValueError as error:
            raise TopologyError(f"{TASKS_PER_NODE}: {error}") from None
        if len(tasks) != len(hosts):
            raise TopologyError(
                f"{self._shown(NODE_LIST)} names {len(hosts)} nodes, and "
                f"{self._shown(TASKS_PER_NODE)} is of {len(tasks)}: one of them describes another step. "
                "srun sets both; MPIClusterResolver asks MPI instead"
            )
        return list(zip(hosts, tasks, strict=True))

    def _check_own_place(self) -> None:
        places = self._places
        if self._rank >= len(places):
            raise TopologyError(
                f"this task's number, {self._shown(RANK)}, is not one of the step's {len(places)} tasks"
            )
        node, host, local_rank = places[self._rank]
        on_node = [rank for rank, place in enumerate(places) if place.node == node]
        tasks = ",".join(str(rank) for rank in on_node)
        known = (
            (NODE_ID, str(node), f"on node {node} of the list"),
            (LOCAL_ID, str(local_rank), f"number {local_rank} on its node"),
            (NODE_NAME, host, f"on {host:.80}"),
            (TASKS_OF_NODE, tasks, f"on a node with the tasks {on_node}"),
        )
        for name, value, would_be in known:
            if self._environ.get(name, value) != value:
                layout = self._shown(NODE_LIST, TASKS_PER_NODE, DISTRIBUTION, PLANE_SIZE)
                raise TopologyError(
                    f"rank {self._rank} would be {would_be}, but Slurm says {self._shown(name)} "
                    f"({layout}). These variables describe "
                    f"another step, or leave out the distribution of its tasks; MPIClusterResolver asks MPI instead."
                )

    def _share_gpus(self, per_node: int | None, per_task: int | None) -> int:
        most_tasks = max(place.local_rank for place in self._places) + 1
        visible = len(self._visible)
        bound = GPUS_PER_TASK in self._environ or visible < self._number(GPUS_ON_NODE, "0")
        if bound and (per_node, per_task) == (None, None):
            self._auto_set_gpu = False  # Slurm has bound each task to its GPUs
            return visible
        per_node = visible if per_node is None else _count("gpus_per_node", per_node)
        per_task = per_node // most_tasks if per_task is None else _count("gpus_per_task", per_task)
        if most_tasks * per_task > per_node:
            raise TopologyError(
                f"{most_tasks} tasks of one node with gpus_per_task={per_task} need {most_tasks * per_task} GPUs, "
                f"but each node has {per_node}: ask for fewer tasks per node, or lower gpus_per_task"
            )
        return per_task

    def _own_gpus(self) -> list[str]:
        first = self._places[self._rank].local_rank * self._gpus_per_task
        last = first + self._gpus_per_task
        # Use the GPU ids that Slurm made visible, because without cgroups a job may have the GPUs 2 and 3.
        if len(self._visible) >= last:
            return list(self._visible[first:last])
        return [str(number) for number in range(first, last)]

    def _variable(self, name: str, default: str | None = None) -> str:
        text = self._environ.get(name, default)
        if text is None:
            raise TopologyError(
                f"{name} is not set: SlurmClusterResolver describes a step, so start this program with srun. Under "
                f"mpirun, MPIClusterResolver asks MPI instead."
            )
        return text

    def _number(self, name: str, default: str | None = None) -> int:
        text = self._variable(name, default)
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise TopologyError(f"{name}={text!r:.80} is not a number; srun sets it")
        return int(text)

    def _shown(self, *names: str) -> str:
        shown = []
        for name in names:
            if name in self._environ:
                shown.append(f"{name}={self._environ[name]:.200}")
        return ", ".join(shown)


def hosts_of_components(environ: Environment = os.environ) -> list[list[str]]:
    """Return a list of the node names of each component of a heterogeneous job.

    Returns: [] outside such a job, and if Slurm has not set the components' node lists.
    Raises: TopologyError if a node list cannot be read.
    """
    hosts: list[list[str]] = []
    while (name := COMPONENT_NODES.format(len(hosts))) in environ:
        hosts.append(_hosts_in(environ, name))
    return hosts


def own_component(environ: Environment = os.environ) -> int | None:
    """Return the number, from 0, of the heterogeneous job's component that has this process's node.

    No two components share a node. Called by: `job_roles`.
    Returns: None outside such a job, and if Slurm has not set the components' node lists or the node's name.
    Raises: TopologyError if a node list cannot be read.
    """
    hosts = hosts_of_components(environ)
    node = environ.get(NODE_NAME, "")
    for number, nodes in enumerate(hosts):
        if node in nodes:
            return number
    return None


def _hosts_in(environ: Environment, name: str) -> list[str]:
    """Return the hosts in the host list of the variable `name`; [] if the variable is not set.

    Raises: TopologyError if the list cannot be read, or names a node twice (except in `ARBITRARY_LIST`).
    """
    try:
        hosts = expand_hostlist(environ.get(name, ""))
    except ValueError as error:
        raise TopologyError(f"{name}: {error}") from None
    if name != ARBITRARY_LIST and len(set(hosts)) < len(hosts):
        raise TopologyError(f"{name}={environ[name]:.200} names a node twice")
    return hosts


def _natural(host: str) -> list[tuple[str, int]]:
    """Return a sort key for host names: runs of digits compare as numbers, so that n9 comes before n10."""
    parts = re.findall(r"([0-9]+)|([^0-9]+)", host)
    return [(letters, int(digits or 0)) for digits, letters in parts]


def _counts(name: str, counts: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(counts, Mapping) or not all(isinstance(key, str) for key in counts):
        raise TypeError(f"{name} must be a dict of names to numbers of tasks, got {counts!r}")
    return {key: _count(f"{name}[{key!r}]", count) for key, count in counts.items()}


def _count(name: str, value: int | str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", str(value)):  # True, 1.0 and -1 do not match
        raise ValueError(f"{name}={value!r}: expected a number from 0 on")
    return int(value)


class TaskPlacement(NamedTuple):
    """The node on which Slurm runs one task.

    Attributes:
        node: position of the node in Slurm's list of the step's nodes, from 0.
        host: the node's name.
        local_rank: position of the task among its node's tasks, in the order of task numbers, from 0.
    """

    node: int
    host: str
    local_rank: int


def place_tasks(
    tasks_of_nodes: Sequence[tuple[str, int]],
    distribution: str = "block",
    host_of_task: Sequence[str] = (),
) -> list[TaskPlacement]:
    """Return the node and the local rank of every task, in the order of Slurm's task numbers.

    Args:
        tasks_of_nodes: (host, number of tasks) of each node, in Slurm's order.
        distribution: a value of `srun -m`. "block" fills one node after the other. "cyclic" gives every node one task
            in turn, and "plane=2" gives it two; full nodes are skipped. The part after the first ":" or "," is about
            cores and has no effect here.
        host_of_task: the host of each task, for the distribution "arbitrary".
    Raises: TopologyError if the distribution is unknown, or if `host_of_task` contradicts `tasks_of_nodes`.
    """
    nodes = _nodes_of_tasks(tasks_of_nodes, re.split("[:,]", distribution)[0], host_of_task)
    places = []
    placed: collections.Counter[int] = collections.Counter()  # tasks so far, by node
    for node in nodes:
        host, _ = tasks_of_nodes[node]
        places.append(TaskPlacement(node, host, placed[node]))
        placed[node] += 1
    return places


def _nodes_of_tasks(
    tasks_of_nodes: Sequence[tuple[str, int]], distribution: str, host_of_task: Sequence[str]
) -> list[int]:
    counts = [count for _, count in tasks_of_nodes]
    if distribution in ("block", "unknown", "*", ""):
        return _dealt(counts, max(counts, default=1))
    if in_turn := re.fullmatch(r"cyclic|plane=(?!0+$)([0-9]{1,9})", distribution):
        return _dealt(counts, int(in_turn[1] or 1))
    if distribution == "arbitrary" and host_of_task:
        if collections.Counter(host_of_task) != collections.Counter(dict(tasks_of_nodes)):
            raise TopologyError(
                f"SLURM_ARBITRARY_NODELIST has the tasks on {list(host_of_task)!r:.200}, but the step's nodes have "
                f"{list(tasks_of_nodes)!r:.200}"
            )
        hosts = [host for host, _ in tasks_of_nodes]
        return [hosts.index(host) for host in host_of_task]
    raise TopologyError(
        f"the task distribution {distribution!r:.80} (SLURM_DISTRIBUTION) does not say which task runs where (known: "
        f"block, cyclic, plane with SLURM_DIST_PLANESIZE, and arbitrary with SLURM_ARBITRARY_NODELIST); "
        f"MPIClusterResolver asks MPI instead"
    )


def _dealt(counts: list[int], at_once: int) -> list[int]:
    """Return the position of each task's node, in task order, if the nodes in turn get up to `at_once` tasks.

    Args: counts: the number of tasks that each node gets in the end; a full node is skipped.
    """
    turns = []
    for node, count in enumerate(counts):
        turns += [(task // at_once, node) for task in range(count)]
    return [node for _, node in sorted(turns)]
