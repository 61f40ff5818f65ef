"""Sets the environment variables that torchrun sets. Scripts and libraries read them."""

from __future__ import annotations

import os

from mpistrat.topology import Topology


def torchrun_environment(
    topology: Topology, master: tuple[str, int], run_id: str
) -> dict[str, str]:
    """Return the environment variables that torchrun would set on this rank: a dict from name to value.

    Each node is one of torchrun's worker groups, and all ranks have the role "default".

    Args:
        topology: this rank's number, and the node of each rank.
        master: the (address, port) of a running TCPStore; ranks connect to it as clients.
        run_id: a text that is the same on all ranks and different in each job.
    """
    address, port = master
    rank = str(topology.rank)
    size = str(topology.size)
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
    """Set the variables of `torchrun_environment` in os.environ, and overwrite another launcher's values.

    Called by: `mpistrat run`, on every rank.
    """
    os.environ.update(torchrun_environment(topology, master, run_id))


def have_accelerate_use_cpus() -> None:
    """Set ACCELERATE_USE_CPU in os.environ, unless it is set, so that Hugging Face's accelerate uses CPUs.

    Without the variable and without an accelerator, accelerate and the Trainer of transformers would train on every
    rank separately.
    Called by: `mpistrat run`, if there is no accelerator.
    """
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
