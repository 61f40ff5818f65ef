"""Prints, as one JSON line, what MPI, SlurmClusterResolver and Slurm itself say about this rank."""

import json
import os

from mpistrat.cluster_resolver import MPIClusterResolver, SlurmClusterResolver
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology


def facts(topology: Topology) -> list[object]:
    return [topology.rank, topology.size, topology.node_of_rank, topology.hosts]


line: dict[str, object] = {
    "node": os.environ["SLURMD_NODENAME"],
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
}
mpi = MPIClusterResolver()
for moment in ("before MPI", "after MPI"):
    try:
        slurm = SlurmClusterResolver()
        line["slurm"] = facts(slurm.topology())
        line["local_rank"] = slurm.topology().local_rank
        line["addresses"] = slurm.cluster_spec().job_tasks("worker")
        line["task"] = slurm.get_task_info()
    except TopologyError as error:
        line[f"slurm error {moment}"] = str(error)
    try:
        line["mpi"] = facts(mpi.topology())
        line["world"] = [mpi.comm.Get_rank(), mpi.comm.Get_size()]
    except TopologyError as error:
        line["mpi error"] = str(error)
print(json.dumps(line) + "\n", end="", flush=True)
