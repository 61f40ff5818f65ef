"""`mpistrat-bench` as its users start it."""

import json
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sweep(launcher: Launcher, tmp_path: Path, operation: str) -> None:
    """Sizes that go through MPI and through shared memory; everything right, and in the file as in the table."""
    ranks = 3
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    job = launcher.run_python(
        ranks,
        *("-m", "mpistrat.tools.bench", operation, "-b", "4K", "-e", "4M", "-f", "32", "-n", "3"),
        *("--json", file, "--plot", picture),
        seconds=90,
    )
    assert job.returncode == 0, job.output
    assert "# Out of bounds values: 0 OK" in job.stdout
    assert f"# {operation} over {ranks} ranks" in job.stdout
    content = json.loads(file.read_text())
    assert content["operation"] == operation
    assert content["surroundings"]["ranks"] == ranks
    table = [line.split() for line in job.stdout.splitlines() if line.startswith(" ")]
    assert len(table) == len(content["rows"]) == 3
    for cells, row in zip(table, content["rows"], strict=True):
        assert cells[0] == str(row["bytes"])
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["bytes"] / row["p50"] / 1e3)
        assert min(row["samples"]) <= row["p50"] <= row["p99"] <= max(row["samples"]) + 1e-3
        assert 0 <= row["slowest_rank"] < ranks
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_buffers_in_the_window(launcher: Launcher) -> None:
    job = launcher.run_python(
        2, "-m", "mpistrat.tools.bench", "allreduce", "--window", "-b", "1M", "-e", "1M", "-n", "5"
    )
    assert job.returncode == 0, job.output
    assert "window: up to 3.1 MB" in job.stdout


def test_a_mistake_on_the_command_line(launcher: Launcher) -> None:
    """Ends the job, with a message, before MPI starts."""
    job = launcher.run_python(2, "-m", "mpistrat.tools.bench", "all_reduce", "-b", "much")
    assert job.returncode == 2, job.output
    assert "expected bytes such as 4096" in job.output
