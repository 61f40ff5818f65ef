"""`mpistrat-bench` as its users start it."""

import json
from pathlib import Path

import pytest

from support.harness.mpi_launcher import Launcher

TESTS = Path(__file__).parents[1]
OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sweep(launcher: Launcher, tmp_path: Path, operation: str) -> None:
    """Sizes that go through MPI and through shared memory; everything right, and in the file as in the table."""
    ranks = 3
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    job = launcher.run_python(
        ranks,
        *("-m", "mpistrat.tools.bench", operation, "-b", "4K", "-e", "4M", "-f", "32", "-n", "3"),
        *("--device", "cpu"),
        *("--json", file, "--plot", picture),
        seconds=90,
    )
    assert job.returncode == 0, job.output
    assert "# Out of bounds values: 0 OK" in job.stdout
    assert f"# {operation} over {ranks} ranks, in host memory" in job.stdout
    content = json.loads(file.read_text())
    assert content["operation"] == operation
    assert content["surroundings"]["ranks"] == ranks
    before, after = content["surroundings"]["distance_us"]
    words = f"# Two ranks handed each other 128 KB in {before:.0f} us before, and in {after:.0f} us after"
    assert words in job.stdout
    table = [line.split() for line in job.stdout.splitlines() if line.startswith(" ")]
    assert len(table) == len(content["rows"]) == 3
    for cells, row in zip(table, content["rows"], strict=True):
        assert cells[0] == str(row["bytes"])
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["bytes"] / row["p50"] / 1e3)
        assert min(row["samples"]) <= row["p50"] <= row["p99"] <= max(row["samples"]) + 1e-3
        assert 0 <= row["slowest_rank"] < ranks
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long("It measures each collective and two peers, one after another.")
@pytest.mark.usefixtures("simulated_accelerator")
def test_on_a_device(launcher: Launcher, tmp_path: Path) -> None:
    """Operands, peers and models are in a device's memory, and the report names it."""
    sweep = ("-b", "4K", "-e", "128K", "-f", "32", "-n", "3")
    commands = [
        *((operation, *sweep, "--json", str(tmp_path / operation)) for operation in OPERATIONS),
        ("train", "--steps", "2", "--batch-size", "8", "--json", str(tmp_path / "train")),
        ("compare", "all_reduce", *sweep[:6], "--rounds", "2"),
        ("compare", "torch", "--calls", "all_gather", "--size", "64", "--rounds", "2"),
        ("all_reduce", "--device", "sim:5"),
    ]
    words = [word for command in commands for word in ("--", *command)]
    job = launcher.run_python(
        2,
        TESTS / "launch/programs/bench_on_simulated_accelerator.py",
        *words,
        seconds=120,
        forked=True,
    )
    assert job.returncode == 2, job.output
    mistake = (
        "--device sim:5: rank 0: device 'sim:5' does not exist: this process sees 2 sim devices"
    )
    assert mistake in job.stderr
    assert "# all_reduce over 2 ranks, in the memory of sim:0 (simulated accelerator)" in job.stdout
    assert job.stdout.count("# Out of bounds values: 0 OK") == len(OPERATIONS)
    assert "parameters equal on all ranks, losses finite: OK" in job.stdout
    assert "simccl us" in job.stdout
    assert "raw MPI: skipped, MPI was not seen to take memory of sim:0" in job.stdout
    assert job.stdout.count("violations: []") == 2
    for name in (*OPERATIONS, "train"):
        content = json.loads((tmp_path / name).read_text())
        assert content["surroundings"]["device"] == "sim:0 (simulated accelerator)"
        assert any("simccl" in way for way in content["surroundings"]["ways"])


def test_buffers_in_the_window(launcher: Launcher) -> None:
    job = launcher.run_python(
        2,
        *("-m", "mpistrat.tools.bench", "allreduce", "--window", "-b", "1M", "-e", "1M", "-n", "5"),
        *("--device", "cpu"),
    )
    assert job.returncode == 0, job.output
    assert "window: up to 3.1 MB" in job.stdout


def test_a_mistake_on_the_command_line(launcher: Launcher) -> None:
    """Ends the job, with a message, before MPI starts."""
    job = launcher.run_python(2, "-m", "mpistrat.tools.bench", "all_reduce", "-b", "much")
    assert job.returncode == 2, job.output
    assert "expected bytes such as 4096" in job.output
