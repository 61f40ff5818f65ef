"""The environment of torchrun's workers."""

import re
from pathlib import Path

import pytest

from mpistrat.cluster_resolver.torchrun import torchrun_environment
from mpistrat.topology import Topology


def test_the_ranks_of_two_nodes() -> None:
    """Rank 2 is the second of the first node's two ranks."""
    topology = Topology.from_hosts(2, ["n9", "n10", "n9", "n10"], "mpi")
    environment = torchrun_environment(topology, ("10.0.0.9", 4321), "a run")
    assert environment == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.9",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RUN_ID": "a run",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_nothing_that_torchrun_sets_is_missing() -> None:
    agent = pytest.importorskip("torch.distributed.elastic.agent.server.local_elastic_agent")
    source = Path(agent.__file__).read_text()
    (table,) = re.findall(r"worker_env = \{(.*?)\n            \}", source, re.DOTALL)
    names = set(re.findall(r'"([A-Z_]+)": ', table)) - {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert names
    assert names <= torchrun_environment(Topology.single(), ("127.0.0.1", 1), "").keys()
