"""Runs the stages of scripts/test-gpu, whatever the ones before did, and writes report.md and report.json."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.harness.mpi_launcher import Launcher, run_job
from support.harness.report import show
from support.harness.stage import TOP, Stage

RANKS = (1, 2)  # alone, and two that share the GPU
SECONDS_PER_BENCHMARK = 240.0
TARGET = 1.02  # a training step on one GPU, over plain PyTorch's


def gpus() -> list[str]:
    """What nvidia-smi says of them; none where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.splitlines() if process.returncode == 0 else []


def machine(launcher: Launcher) -> dict[str, Any]:
    def version(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "none"

    return {
        "gpus": gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": launcher.name,
        "python": platform.python_version(),
        "torch": version("torch"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "mpi4py": version("mpi4py"),
        "date": datetime.date.today().isoformat(),
    }


def stages(mpi: str) -> list[Stage]:
    """The GPU tests; without a GPU each says that it needs one."""
    unit = ["tests/unit/input/test_device_copies.py", "-m", "gpu"]
    return [Stage("unit", pytest=unit)] + [
        Stage("mpi", pytest=["tests/mpi/test_on_gpu.py", "-m", "gpu"], mpi=mpi, ranks=ranks)
        for ranks in RANKS
    ]


def skips(stage: Stage) -> list[str]:
    """What pytest says was skipped, and for want of what."""
    return [line for line in stage.output.splitlines() if line.startswith("SKIPPED")]


def benchmark(name: str, ranks: int, launcher: Launcher, folder: Path) -> dict[str, Any]:
    """Its rows, and what it printed."""
    prefix = folder / f"{ranks}-ranks-"
    program = [sys.executable, f"benchmarks/{name}.py", "--json", str(prefix)]
    try:
        command = launcher.command(ranks, program)
        job = run_job(command, launcher.environment(), SECONDS_PER_BENCHMARK, TOP)
        code, output = job.returncode, job.output
    except subprocess.TimeoutExpired as late:
        output = "".join(map(str, (late.stdout, late.stderr)))
        code, output = 1, f"{output}\nkilled after {SECONDS_PER_BENCHMARK:g} s\n"
    written = Path(f"{prefix}{name}.json")
    rows = json.loads(written.read_text())["rows"] if written.exists() else []
    print(f"{'FAILED' if code else 'ok':6}  {name} {ranks}", flush=True)
    return {"benchmark": name, "ranks": ranks, "code": code, "rows": rows, "output": output}


def target_is_met(benchmarks: list[dict[str, Any]]) -> bool | None:
    """Whether one rank's steps take at most TARGET of plain PyTorch's; None where they were not measured."""
    ratios = [
        row["mpistrat / this"]
        for benchmark in benchmarks
        if benchmark["benchmark"] == "gpu_training" and benchmark["ranks"] == 1
        for row in benchmark["rows"]
        if row["training step"].startswith("plain")
    ]
    return max(ratios) <= TARGET if ratios else None


def table(rows: list[dict[str, Any]]) -> list[str]:
    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    if not rows:
        return ["nothing measured"]
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(map(cell, row.values())) for row in rows]
    return [f"| {line} |" for line in lines]


def markdown(facts: dict[str, Any]) -> str:
    lines = ["# GPU report", "", *table([facts["machine"]])]
    if not facts["machine"]["gpus"]:
        lines += ["", "No NVIDIA GPU: the tests were skipped, and nothing was measured."]
    lines += ["", "## Tests", "", *table(facts["tests"]), "", *facts["skips"]]
    for benchmark in facts["benchmarks"]:
        lines += [
            "",
            f"## {benchmark['benchmark']}, {benchmark['ranks']} ranks",
            "",
            *table(benchmark["rows"]),
        ]
    if facts["benchmarks"]:
        words = {True: "met", False: "missed", None: "not measured"}[facts["target_is_met"]]
        lines += ["", f"Target: one rank's step within {TARGET} of plain PyTorch's: {words}."]
    failed = [benchmark for benchmark in facts["benchmarks"] if benchmark["code"]]
    failures = facts["failures"] | {
        benchmark["benchmark"]: benchmark["output"] for benchmark in failed
    }
    for title, output in failures.items():
        lines += ["", f"## Failed: {title}", "", "```", output[-8000:].strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    mpi = "Open MPI" if "MPISTRAT_TEST_OPENMPI" in os.environ else "MPICH"
    launcher = Launcher.named(mpi)
    done = stages(mpi)
    for stage in done:
        stage.run()
        show(stage)
        print("\n".join(skips(stage)))
    benchmarks = []
    if gpus():
        plan = [("gpu_training", 1), ("gpu_training", 2), ("gpu_collectives", 2)]
        benchmarks = [benchmark(name, ranks, launcher, folder) for name, ranks in plan]
    else:
        print("no NVIDIA GPU: the tests were skipped, and nothing was measured")
    facts = {
        "machine": machine(launcher),
        "tests": [
            {
                "stage": stage.name,
                "ranks": stage.ranks or "-",
                "passed": stage.passed,
                "failed": stage.failed,
                "skipped": stage.skipped,
                "seconds": stage.seconds,
            }
            for stage in done
        ],
        "skips": [line for stage in done for line in skips(stage)],
        "failures": {f"{s.name} {s.ranks or ''}": s.output for s in done if s.failed},
        "benchmarks": benchmarks,
        "target_is_met": target_is_met(benchmarks),
    }
    (folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "report.md").write_text(markdown(facts))
    print(f"written: {folder / 'report.md'}")
    failed = any(stage.failed for stage in done) or any(result["code"] for result in benchmarks)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
