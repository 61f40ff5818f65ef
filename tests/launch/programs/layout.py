"""Prints, as one JSON line, what MPI, SlurmClusterResolver and Slurm itself say about this rank, and its role.

Usage: layout.py [TYPE=TASKS...]
"""

import json
import os
import sys

from mpistrat.cluster_resolver import MPIClusterResolver, SlurmClusterResolver
from mpistrat.cluster_resolver.roles.job_roles import job_roles
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology


def facts(topology: Topology) -> list[object]:
    return [topology.rank, topology.size, topology.node_of_rank, topology.hosts]


line: dict[str, object] = {
    "node": os.environ["SLURMD_NODENAME"],
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
}
jobs = {name: int(tasks) for name, tasks in (argument.split("=") for argument in sys.argv[1:])}
mpi = MPIClusterResolver()
for moment in ("before MPI", "after MPI"):
    try:
        slurm = SlurmClusterResolver(jobs or None)
        line["slurm"] = facts(slurm.topology())
        line["local_rank"] = slurm.topology().local_rank
        cluster = slurm.cluster_spec()
        line["addresses"] = [task for job in cluster.jobs for task in cluster.job_tasks(job)]
        line["task"] = slurm.get_task_info()
    except TopologyError as error:
        line[f"slurm error {moment}"] = str(error)
    try:
        line["mpi"] = facts(mpi.topology())
        line["world"] = [mpi.comm.Get_rank(), mpi.comm.Get_size()]
    except TopologyError as error:
        line["mpi error"] = str(error)
if "mpi" in line:
    try:
        roles = job_roles(mpi.topology(), mpi.comm.allgather, None, None, chief=True)
        line["role"] = [roles.task_type, roles.task_id]
    except ValueError as error:
        line["role error"] = str(error)
print(json.dumps(line) + "\n", end="", flush=True)
