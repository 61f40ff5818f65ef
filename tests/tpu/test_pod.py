"""The program of CHECKLIST.md answers on the CPU device, so that it does on a TPU."""

import json
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "pod.py"


def answers(ranks: int, devices: int, *arguments: str | Path) -> list[dict[str, object]]:
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    mpich = Launcher.named("MPICH")
    job = mpich.run_python(ranks, PROGRAM, *arguments, env=environment, seconds=120, forked=True)
    assert job.returncode == 0, job.output
    found = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(found) == ranks
    return found


def test_environment() -> None:
    assert [answer["mesh"] for answer in answers(2, 2, "environment")] == ["[2 2 1 1]"] * 2


def test_logical_devices() -> None:
    (answer,) = answers(1, 4, "logical_devices")
    assert answer["cores"] == 4
    assert answer["difference"] == pytest.approx(0, abs=1e-5)


def test_bfloat16() -> None:
    """Added up in 16 bits, 256 and ones stay 256."""
    assert {answer["sum"] for answer in answers(2, 2, "bfloat16")} <= {258.0, 260.0}


def test_sums() -> None:
    """Through the host, which the CPU device does not tell of: it never connects ranks."""
    for answer in answers(2, 1, "sums"):
        assert answer["mean"] == answer["expected"] == [2.0]
        assert not answer["by XLA"]
        assert answer["world"] == 1
        assert not answer["pending"]


def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    first = answers(2, 1, "checkpoint", tmp_path)
    then = answers(1, 2, "checkpoint", tmp_path)
    assert {answer["digest"] for answer in then} == {answer["digest"] for answer in first}
    assert [answer["restored"] for answer in (*first, *then)] == [False, False, True]
