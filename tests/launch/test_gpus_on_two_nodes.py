"""Values on GPUs of several nodes: sums by node, the bytes that cross the wire, and the policies that ask for it."""

import re
from pathlib import Path

import pytest

from support.clusters import two_nodes
from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).with_name("programs") / "gpus_on_two_nodes.py"
# To MPI its device memory is the host's.
CUPY = """
import types
import numpy as np

class ndarray(np.ndarray):
    data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))
    get = np.copy

asarray = lambda array: np.array(array).view(ndarray)
device = types.SimpleNamespace(use=lambda: None, synchronize=lambda: None)
cuda = types.SimpleNamespace(
    Device=lambda index: device, runtime=types.SimpleNamespace(getDeviceCount=lambda: 1)
)
"""


@pytest.mark.usefixtures("simulated_accelerator")
def test_what_is_large_goes_by_node(launcher: Launcher, tmp_path: Path) -> None:
    """Each byte crosses the wire as if a node were one rank: of N = 2, 2 (N - 1) / N times, and 5 % for headers."""
    if reason := two_nodes.why_not():
        pytest.skip(reason)
    (tmp_path / "cupy.py").write_text(CUPY)
    with two_nodes.two_nodes(tmp_path) as nodes:
        arguments = PROGRAM, tmp_path, nodes.agent
        job = nodes.run_python(launcher, 2, *arguments, env={"SIMULATED_DEVICES": "1"})
    assert job.returncode == 0, job.output
    assert "all is well" in job.stdout, job.output
    for way, how in (
        (
            "staged",
            "in chunks through pinned host memory; not by MPI from device memory (not tried)",
        ),
        ("device-aware", "through MPI, which was seen to take device memory"),
    ):
        start = rf"(?m)^{way}: buffers on GPUs: through simccl .*; large ones by node, in 2 slices between the nodes, "
        assert re.search(
            rf"{start}{re.escape(how)}, (from \d+ bytes on|never); of S", job.stdout
        ), job.output
        for call in ("all_reduce", "broadcast"):
            sent = sorted(map(float, re.findall(rf"{way} {call} (\d\.\d{{4}})", job.stdout)))
            assert len(sent) == 3, job.output
            assert 0.95 < sent[1] < 1.05, (way, call, sent)
    assert re.search(r"(?m)^    by node: .* us \+ .* ns per byte", job.stdout), job.output
