"""The environment of a rank is the one that torch_xla itself gives a process of its own launcher.

Needs torch_xla, and no TPU: torch_xla derives the environment from variables. In a child process, whose environment
is made up and which starts no device.
"""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cluster_resolver.tpu.discovery import discover_slice
from mpistrat.cluster_resolver.tpu.pjrt import pjrt_environment
from mpistrat.topology import Topology

TOP = Path(__file__).parents[2]

# Each line of the input is (environment, local rank, local size); of the output, the environment after it.
PROGRAM = """
import json, os, sys
from torch_xla._internal import pjrt, tpu
from torch_xla import runtime
pjrt.xm.get_xla_supported_devices = lambda: []   # starts no device
pjrt.xm.set_replication = lambda *_: None
pjrt.torch_xla.device = lambda: None
for line in sys.stdin:
    environ, local_rank, local_size = json.loads(line)
    os.environ.clear()
    os.environ.update(environ)
    pjrt.initialize_multiprocess(local_rank, local_size)
    print("RESULT" + json.dumps(dict(os.environ)))
"""
# What a slice is called by, and not what it makes of a rank.
FROM_PLATFORM = (
    "TPU_SKIP_MDS_QUERY",
    "TPU_ACCELERATOR_TYPE",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
)

# accelerator type, bounds of hosts, bounds of each host's chips
SLICES = [
    ("v3-8", "1,1,1", "2,2,1"),
    ("v3-64", "2,4,1", "2,2,1"),
    ("v4-8", "1,1,1", "2,2,1"),
    ("v4-16", "1,1,2", "2,2,1"),
    ("v4-256", "2,2,8", "2,2,1"),
    ("v5litepod-8", "1,1,1", "2,4,1"),
    ("v5litepod-16", "2,2,1", "2,2,1"),
    ("v5p-16", "1,1,2", "2,2,1"),
    ("v6e-256", "8,8,1", "2,2,1"),
    ("tpu7x-8", "1,1,1", "2,2,1"),
    ("tpu7x-32", "1,1,4", "2,2,1"),
]


def random_slice(source: random.Random) -> tuple[str, str, str]:
    hosts = [source.randint(1, 4) for _ in range(3)]
    chips = [source.randint(1, 3) for _ in range(3)]
    number = math.prod(hosts) * math.prod(chips)
    kind = source.choice(["v4-{2}", "v5p-{2}", "v5litepod-{1}", "v6e-{1}", "tpu7x-{2}"])
    kind = kind.replace("{2}", str(2 * number)).replace("{1}", str(number))
    return kind, ",".join(map(str, hosts)), ",".join(map(str, chips))


@pytest.mark.time_limit(300)
def test_one_rank_per_chip_has_the_environment_of_torch_xla() -> None:
    source = random.Random(8)
    asked, derived = [], []
    for kind, hosts, chips in [*SLICES, *(random_slice(source) for _ in range(60))]:
        num_hosts = math.prod(map(int, hosts.split(",")))
        names = [f"10.1.{host // 256}.{host % 256}" for host in range(num_hosts)]
        environs = [
            {
                "PJRT_DEVICE": "TPU",
                "TPU_SKIP_MDS_QUERY": "1",
                "TPU_ACCELERATOR_TYPE": kind,
                "TPU_HOST_BOUNDS": hosts,
                "TPU_CHIPS_PER_HOST_BOUNDS": chips,
                "TPU_WORKER_ID": str(worker),
                "TPU_WORKER_HOSTNAMES": ",".join(names),
            }
            for worker in source.sample(range(num_hosts), num_hosts)
        ]
        slices = [discover_slice(environ) for environ in environs]
        units = slices[0].units_per_host
        nodes = [node for node in range(num_hosts) for _ in range(units)]
        of_ranks = [slices[node] for node in nodes]
        for rank in {0, len(nodes) - 1, *source.sample(range(len(nodes)), 1)}:
            topology = Topology(rank, len(nodes), tuple(nodes))
            derived.append(pjrt_environment(topology, of_ranks))
            asked.append([environs[nodes[rank]], topology.local_rank, units])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=TOP,
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert len(lines) == len(asked) > 100, result.stderr
    for question, line, ours in zip(asked, lines, derived, strict=True):
        theirs = json.loads(line.removeprefix("RESULT"))
        assert ours == {k: v for k, v in theirs.items() if k not in FROM_PLATFORM}, question
