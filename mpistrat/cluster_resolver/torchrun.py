"""The environment that torchrun gives its workers, from a `Topology`: scripts and libraries read it."""

from __future__ import annotations

import os

from mpistrat.topology import Topology


def torchrun_environment(
    topology: Topology, master: tuple[str, int], run_id: str
) -> dict[str, str]:
    """What torchrun would set on this rank; a node is a group of workers, and all have the same role.

    Args:
        master: the address and port of a TCPStore that runs: ranks connect to it as clients.
        run_id: the same on all ranks, and another one in each job.
    """
    address, port = master
    rank, size = str(topology.rank), str(topology.size)
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(topology.local_rank),
        "LOCAL_WORLD_SIZE": str(topology.local_size),
        "GROUP_RANK": str(topology.node),
        "GROUP_WORLD_SIZE": str(topology.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def set_torchrun_environment(topology: Topology, master: tuple[str, int], run_id: str) -> None:
    """Set them in this process's environment, over what may be there from another launcher."""
    os.environ.update(torchrun_environment(topology, master, run_id))


def have_accelerate_use_cpus() -> None:
    """Have Hugging Face's accelerate use CPUs, as `accelerate launch --cpu` does, unless the user has set whether.

    Where it finds no accelerator, and is not told so, it trains on every rank by itself, and so does the Trainer of
    transformers.
    """
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
