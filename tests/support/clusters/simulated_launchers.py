"""What Slurm and MPI's launchers put into the environment of each task, laid out anew from their documentation.

An oracle for tests: it shares no code with the package. Sources: srun(1), sections "distribution" and "OUTPUT
ENVIRONMENT VARIABLES"; the variables that mpiexec of MPICH and Open MPI were seen to set.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

Environment = dict[str, str]


@dataclass(frozen=True)
class Step:
    """One `srun`: tasks on nodes in the order in which Slurm numbers them.

    Attributes:
        hosts: one name per node.
        node_of_task: by task; nodes are numbers in `hosts`.
        distribution: as in `srun -m`.
    """

    hosts: tuple[str, ...]
    node_of_task: tuple[int, ...]
    distribution: str

    @classmethod
    def laid_out(
        cls, hosts: Sequence[str], capacity: Sequence[int], tasks: int, distribution: str
    ) -> "Step":
        """Deal out `tasks`, at most `capacity[node]` to each node, as srun(1) says for `distribution`."""
        if distribution == "block":
            at_once = max(capacity)
        elif distribution == "cyclic":
            at_once = 1
        else:
            at_once = int(distribution.removeprefix("plane="))
        room = list(capacity)
        nodes: list[int] = []
        while len(nodes) < tasks:
            for node in range(len(hosts)):
                dealt = min(at_once, room[node], tasks - len(nodes))
                nodes += [node] * dealt
                room[node] -= dealt
        used = sorted(set(nodes))  # a step has no nodes without tasks
        used_hosts = tuple(hosts[node] for node in used)
        node_of_task = tuple(used.index(node) for node in nodes)
        return cls(used_hosts, node_of_task, distribution)

    @property
    def size(self) -> int:
        return len(self.node_of_task)

    def tasks_on(self, node: int) -> list[int]:
        return [task for task, n in enumerate(self.node_of_task) if n == node]

    def host_of(self, task: int) -> str:
        return self.hosts[self.node_of_task[task]]

    def local_rank(self, task: int) -> int:
        return self.tasks_on(self.node_of_task[task]).index(task)

    def environment(self, task: int, step_id: str = "0") -> Environment:
        """As slurmstepd sets it for one task."""
        node = self.node_of_task[task]
        tasks = [str(each) for each in self.tasks_on(node)]
        nodes = range(len(self.hosts))
        counts = [self.node_of_task.count(each) for each in nodes]
        environ = {
            "SLURM_JOB_ID": "71",
            "SLURM_STEP_ID": step_id,
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(self.local_rank(task)),
            "SLURM_NODEID": str(node),
            "SLURMD_NODENAME": self.hosts[node],
            "SLURM_GTIDS": ",".join(tasks),
            "SLURM_STEP_NUM_TASKS": str(self.size),
            "SLURM_STEP_NUM_NODES": str(len(self.hosts)),
            "SLURM_STEP_NODELIST": hostlist(self.hosts),
            "SLURM_STEP_TASKS_PER_NODE": counts_by_node(counts),
            "SLURM_DISTRIBUTION": self.distribution,
            "CUDA_VISIBLE_DEVICES": "",
        }
        if self.distribution.startswith("plane"):
            environ["SLURM_DISTRIBUTION"], _, environ["SLURM_DIST_PLANESIZE"] = (
                self.distribution.partition("=")
            )
        if self.distribution == "arbitrary":
            hosts = [self.host_of(each) for each in range(self.size)]
            environ["SLURM_ARBITRARY_NODELIST"] = ",".join(hosts)
        return environ


def batch_script(step: Step) -> Environment:
    """What `sbatch` gives its script, and srun's tasks inherit unless the step says otherwise."""
    return {
        "SLURM_JOB_ID": "71",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "64",
        "SLURM_NPROCS": "64",
        "SLURM_TASKS_PER_NODE": "16(x4)",
        "SLURM_JOB_NODELIST": "other[1-4]",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": step.hosts[0],
    }


def hostlist(hosts: Sequence[str]) -> str:
    """Slurm's short form: neighbours of one prefix and width become n[9-11,13]; the order stays."""
    parts: list[str] = []
    splits = [_split(host) for host in hosts]
    for (prefix, width), group in itertools.groupby(splits, key=lambda split: split[:2]):
        numbers = [number for _, _, number in group]
        if width is None:
            parts += [prefix] * len(numbers)
            continue
        if len(numbers) == 1:
            parts.append(prefix + numbers[0])
            continue
        runs: list[list[str]] = []
        last: int | None = None
        for number in numbers:
            if last is not None and int(number) == last + 1:
                runs[-1].append(number)
            else:
                runs.append([number])
            last = int(number)
        ranges = []
        for run in runs:
            if len(run) == 1:
                ranges.append(run[0])
            else:
                ranges.append(f"{run[0]}-{run[-1]}")
        parts.append(f"{prefix}[{','.join(ranges)}]")
    return ",".join(parts)


def _split(host: str) -> tuple[str, int | None, str]:
    """Prefix, width of a padded number (0: not padded; None: no number), number."""
    prefix = host.rstrip("0123456789")
    number = host[len(prefix) :]
    if not number:
        return prefix, None, ""
    width = len(number) if number.startswith("0") else 0
    return prefix, width, number


def counts_by_node(counts: Sequence[int]) -> str:
    """ "2(x3),1" for 2, 2, 2, 1."""
    runs = []
    for count, group in itertools.groupby(counts):
        times = len(list(group))
        runs.append(f"{count}(x{times})" if times > 1 else str(count))
    return ",".join(runs)


def launched_by(launcher: str, size: int, rank: int, step: Step | None = None) -> Environment:
    """What `launcher` adds to the environment of rank `rank` of `size`."""
    pmi = {"PMI_SIZE": str(size), "PMI_RANK": str(rank), "PMI_FD": "9"}
    if launcher == "hydra":
        return {**pmi, "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": str(size)}
    if launcher in ("mpirun 4", "mpirun 5"):
        environ = {
            "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_RANK": str(rank),
            "PMIX_RANK": str(rank),
        }
        if launcher == "mpirun 5":
            environ["PRTE_LAUNCHED"] = "1"
        return environ
    if launcher == "mpirun_rsh":
        return {"MV2_COMM_WORLD_SIZE": str(size), "MV2_COMM_WORLD_RANK": str(rank)}
    if launcher == "pals":
        return {"PALS_RANKID": str(rank), "PALS_NODEID": "0"}
    if launcher.startswith("srun"):
        assert step is not None
        environ = step.environment(rank, step_id="1")
        if launcher == "srun pmi2":
            environ.update(pmi)
        elif launcher == "srun pmix":
            environ["PMIX_RANK"] = str(rank)
        return environ
    assert launcher == "python"
    return {}
