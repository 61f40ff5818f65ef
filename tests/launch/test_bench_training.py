"""`mpistrat-bench train`, `input` and `compare`, and the programs behind the recorded results, as they are started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpistrat.tools.bench.command_line import TORCH_CALLS
from support.harness.mpi_launcher import Launcher

TOP = Path(__file__).parents[2]
BENCH = ("-m", "mpistrat.tools.bench")
PEERS = [
    *("raw MPI, flat buffer", "raw MPI, .grad in the buffer", "DDP, gloo", "FSDP2, gloo"),
    *("DDP, mpistrat", "FSDP2, mpistrat"),
]


def test_train(launcher: Launcher, tmp_path: Path) -> None:
    """With real input, of which each rank reads its part; efficiency is given only where there are cores."""
    file, picture = tmp_path / "row.json", tmp_path / "picture.png"
    ranks = 2
    arguments = (*BENCH, "train", "--batch-size", "8", "--steps", "6", "--input", "digits")
    job = launcher.run_python(
        ranks, *arguments, "--json", file, "--plot", picture, seconds=90, forked=True
    )
    assert job.returncode == 0, job.output
    content = json.loads(file.read_text())
    row = content["rows"][0]
    assert (row["batch_size"], row["examples_per_rank"]) == (8, 4)
    assert np.array(row["samples"]["step_ms"]).shape == (ranks, 6)
    assert row["ranks_that_differ"] == []
    assert row["slowest_rank"] in range(ranks)
    oversubscribed = len(os.sched_getaffinity(0)) < ranks
    assert (
        (row["efficiency"] is None) == content["surroundings"]["oversubscribed"] == oversubscribed
    )
    assert "parameters equal on all ranks, losses finite: OK" in job.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_efficiency_where_ranks_share_cores(launcher: Launcher) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    job = launcher.run_python(
        ranks,
        *BENCH,
        "train",
        "--steps",
        "1",
        "--batch-size",
        str(ranks),
        seconds=120,
        forked=True,
    )
    assert job.returncode == 0, job.output
    assert f"not given: {ranks} ranks share {ranks - 1} cores" in job.stdout


def test_a_batch_that_ranks_do_not_divide(launcher: Launcher) -> None:
    job = launcher.run_python(2, *BENCH, "train", "--batch-size", "65", seconds=60, forked=True)
    assert job.returncode == 2, job.output
    expected = "--batch-size 65 is the global batch and does not divide by 2 ranks; give a multiple, such as 64"
    assert job.output.count(expected) == 1


def test_a_file_that_one_rank_lacks(launcher: Launcher, tmp_path: Path) -> None:
    """All ranks end, with that rank's reason."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom mpi4py import MPI\nfrom mpistrat.tools.bench.command import main\n"
        f"file = {str(__file__)!r} if MPI.COMM_WORLD.rank else 'nowhere'\n"
        "sys.exit(main(['train', '--model', 'transformer', '--input', file]))\n"
    )
    job = launcher.run_python(2, program, seconds=60, forked=True)
    assert job.returncode == 2, job.output
    assert "--input nowhere: " in job.output


def test_compare_training_steps(launcher: Launcher, tmp_path: Path) -> None:
    """All train alike: a rank alone does not."""
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    job = launcher.run_python(
        2,
        *(*BENCH, "compare", "train", "--batch-size", "4", "--rounds", "2"),
        *("--json", file, "--plot", picture),
        seconds=90,
        forked=True,
    )
    assert job.returncode == 0, job.output
    content = json.loads(file.read_text())
    rows = {row["training step"]: row for row in content["rows"]}
    assert [name for name in rows if name in PEERS] == PEERS
    ours, alone = rows["mpistrat"]["loss"], rows["one rank alone"]["loss"]
    assert all(rows[name]["loss"] == pytest.approx(ours, rel=1e-4) for name in PEERS)
    assert alone != pytest.approx(ours, rel=1e-4)
    for name in ("DDP", "FSDP2"):
        ratio = rows[f"{name}, mpistrat"]["ms"] / rows[f"{name}, gloo"]["ms"]
        assert rows[f"{name}, mpistrat"]["this / gloo"] == pytest.approx(ratio)
    assert set(content["left_out"]) <= {"Horovod", "TensorFlow"}
    for name, reason in content["left_out"].items():
        assert f"{name}: skipped, {reason}" in job.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_sums(launcher: Launcher, tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    job = launcher.run_python(
        3,
        *(*BENCH, "compare", "allreduce", "-b", "64K", "-e", "1M", "-f", "16", "--rounds", "2"),
        *("--json", file, "--plot", picture),
        seconds=90,
        forked=True,
    )
    assert job.returncode == 0, job.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["bytes"] for row in rows] == [1 << 16, 1 << 20]
    assert all(row["wrong"] == 0 and row["gloo / window"] > 0 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_compare_calls_of_torch(launcher: Launcher, tmp_path: Path) -> None:
    """Every call is right on both backends, with tensors that the ranks do not divide too."""
    file = tmp_path / "rows.json"
    job = launcher.run_python(
        3,
        *(*BENCH, "compare", "torch", "--size", "8", "100K", "--rounds", "1", "--json", file),
        seconds=90,
        forked=True,
    )
    assert job.returncode == 0, job.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["call"] for row in rows] == [call for call in TORCH_CALLS for _ in range(2)]
    assert all(row["wrong"] == 0 and row["gloo / mpistrat"] > 0 for row in rows)


def test_input(launcher: Launcher, tmp_path: Path) -> None:
    file, picture = tmp_path / "rows.json", tmp_path / "picture.png"
    job = launcher.run_python(
        2,
        *BENCH,
        "input",
        "overhead",
        "--rounds",
        "2",
        "--json",
        file,
        "--plot",
        picture,
        forked=True,
    )
    assert job.returncode == 0, job.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["a step of"] for row in rows][:3] == ["DataLoader", "BatchedDataset", "FileDataset"]
    assert all(row["distributed us"] > 0 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long("It starts 20 programs one after another.")
@pytest.mark.time_limit(300)
def test_every_program_behind_the_results_runs(tmp_path: Path) -> None:
    """What scripts/benchmark starts once there are environments."""
    command = [sys.executable, "benchmarks/record.py", "--quick", "--folder", str(tmp_path)]
    job = subprocess.run(command, cwd=TOP, capture_output=True, text=True)
    assert job.returncode == 0, job.stdout + job.stderr
    written = {path.name.removeprefix("mpich-2-ranks-") for path in tmp_path.iterdir()}
    expected = {
        "run",
        "all_reduce",
        "agreement",
        "collectives",
        "training_step",
        "checkpoints",
        "torch",
        "mlp",
        "train-mlp",
    }
    expected |= {"input_overhead", "input_throughput", "sweep"}
    expected |= {f"mpich-3-ranks-{name}" for name in ("parameter_server", "slow_worker")}
    assert {f"{name}.json" for name in expected} | {"steps_per_second.svg"} <= written
    for path in tmp_path.glob("*.json"):
        content = json.loads(path.read_text())
        assert content["schema"] == 1
        assert all(row["samples"] for row in content["rows"])
    if "mpich-2x2-ranks-slow_link.json" in written:
        row = json.loads((tmp_path / "mpich-2x2-ranks-slow_link.json").read_text())["rows"][0]
        assert row["wire limit ms"] == pytest.approx(
            4_208_650 * 32 / 1e9 * 1e3
        )  # of one billion bits per second
    else:
        assert "not measured: needs" in job.stdout


@pytest.mark.slow
@pytest.mark.long("Each contestant starts processes that import timm.")
def test_existing_programs_beside_their_ports(tmp_path: Path) -> None:
    """benchmarks/existing_programs.py; DistributedDataParallel is gloo's, and needs no MPI."""
    mpich = Launcher.named("MPICH")
    environment = mpich.environment()
    environment["PATH"] = os.pathsep.join([environment["PATH"], str(mpich.prefix / "bin")])
    words = ["--sizes", "small", "--programs", "timm_model", "--rounds", "1"]
    command = [sys.executable, "benchmarks/existing_programs.py", *words, "--json", f"{tmp_path}/"]
    job = subprocess.run(
        command, cwd=TOP, env=environment, capture_output=True, text=True, timeout=170
    )
    assert job.returncode == 0, job.stdout + job.stderr
    (file,) = tmp_path.iterdir()
    (row,) = json.loads(file.read_text())["rows"]
    assert {"DDP on gloo", "mpistrat", "bound"} <= row["samples"].keys()
    assert all(row["samples"].values())
