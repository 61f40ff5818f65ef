"""Runs the stages of scripts/test-gpu, whatever the ones before did, and writes report.md and report.json.

A report holds what has run so far: it is written again after each stage.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.accelerator import DEVICE_VARIABLE
from support.harness import gpu_programs
from support.harness.gpu_programs import BENCHMARK, NATIVE, SCRIPT, Program, is_there, show_line
from support.harness.mpi_launcher import Launcher
from support.harness.report import show
from support.harness.stage import Stage

TARGET = 1.02  # a training step on one GPU, over plain PyTorch's
SECONDS = 480  # of a whole run on one GPU
QUICK_SECONDS = 180  # of one with --quick
SECONDS_OF_START = 10  # until the GPUs are known
NEEDED = ("torch", "numpy", "mpi4py", "array_api_compat", "pytest", "pytest_mpi", "hypothesis")
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
    """The accelerators that torch can use here, of any maker."""
    process = subprocess.run([sys.executable, "-c", _SEEN], capture_output=True, text=True)
    if process.returncode:
        print(f"torch cannot say what accelerators there are:\n{process.stderr}", flush=True)
        return []
    last = process.stdout.splitlines()[-1]
    names: list[str] = json.loads(last)
    return names


def drivers() -> str:
    """The GPUs by nvidia-smi; "" where there is no nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    if process.returncode:
        return ""
    return "; ".join(process.stdout.splitlines())


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


def pytest_stages(mpi: str, ranks: Sequence[int]) -> Iterator[Stage]:
    """The GPU tests; without a GPU each says that it needs one."""
    for number in ranks:
        tests = ["tests/mpi/test_on_gpu.py", "-m", "gpu", "-vv"]
        limit = 10.0 + 8 * number
        yield Stage("mpi", pytest=tests, mpi=mpi, ranks=number, limit=limit, on_line=show_line)


def unit_stage() -> Stage:
    tests = ["tests/unit/input/test_device_copies.py", "-m", "gpu", "-vv"]
    return Stage("unit", pytest=tests, limit=9, on_line=show_line)


def plan(
    launcher: Launcher, gpus: Sequence[str], scratch: Path, *, quick: bool
) -> list[Stage | Program]:
    """What matters most first: the real NCCL and the GPU tests of two ranks, which is all with `quick`."""
    simulated = os.environ.get(DEVICE_VARIABLE, "")
    device = simulated
    if gpus and not simulated:
        device = gpus[0].partition(":")[0]
    ranks = numbers_of_ranks(len(gpus))
    programs: list[Stage | Program] = []
    if device in ("cuda", "sim"):  # what support.accelerator can exchange
        programs += gpu_programs.native(device, len(gpus), launcher, scratch)
    if simulated:
        return programs
    tests = list(pytest_stages(launcher.name, ranks))
    first = [stage for stage in tests if stage.ranks == 2]
    if quick:
        return programs + first
    rest = [stage for stage in tests if stage.ranks != 2]
    programs += [*first, unit_stage(), *rest]
    if not gpus:
        return programs
    for number in ranks:
        if number == 1:
            programs += gpu_programs.benchmarks(number, len(gpus))
        programs += gpu_programs.scripts(number, scratch)
    for number in ranks[1:]:
        programs += gpu_programs.benchmarks(number, len(gpus))
    return programs


def skips(stage: Stage) -> list[str]:
    """The tests that pytest has skipped, and what each lacks."""
    return [line for line in stage.output.splitlines() if line.startswith("SKIPPED")]


def target_is_met(measured: Sequence[Program], folder: Path) -> bool | None:
    """Whether one rank's steps take at most TARGET of plain PyTorch's; None where they were not measured."""
    ratios = [
        row["mpistrat / this"]
        for program in measured
        if program.name == "gpu_training" and program.ranks == 1
        for row in rows_of(program, folder)
        if row["training step"].startswith("plain")
    ]
    if not ratios:
        return None
    return max(ratios) <= TARGET


def rows_of(program: Program, folder: Path) -> list[dict[str, Any]]:
    written = folder / program.file
    if program.code or not program.file or not written.exists():
        return []
    measured = json.loads(written.read_text())
    rows: list[dict[str, Any]] = measured["rows"]
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    if not rows:
        return ["nothing measured"]
    first = rows[0]
    columns = [name for name in first if not isinstance(first[name], (list, dict))]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append([cell(row.get(name, "-")) for name in columns])
    return [f"| {' | '.join(line)} |" for line in lines]


def markdown(facts: dict[str, Any]) -> str:
    lines = ["# GPU report", "", *table([facts["machine"]])]
    if not facts["machine"]["gpus"]:
        lines += [
            "",
            "No GPU that torch can use: the tests were skipped, and nothing was measured.",
        ]
    lines += _of_nccl(facts["native"])
    lines += ["", "## Tests", "", *table(facts["tests"])]
    lines += ["", *facts["skips"]]
    if facts["programs"]:
        shown = [_how_it_ended(program) for program in facts["programs"]]
        lines += ["", "## Programs", "", *table(shown)]
    for benchmark in facts["benchmarks"]:
        title = f"## {benchmark['name']}, {benchmark['ranks']} ranks"
        if benchmark["shares_a_gpu"]:
            title += " that share a GPU: speeds mean nothing"
        lines += ["", title, "", *table(benchmark["rows"])]
    if facts["benchmarks"]:
        words = {True: "met", False: "missed", None: "not measured"}[facts["target_is_met"]]
        lines += ["", f"Target: one rank's step within {TARGET} of plain PyTorch's: {words}."]
    if facts["not_run"]:
        lines += ["", f"Not run: {', '.join(facts['not_run'])}."]
    failures = dict(facts["failures"])
    for kind in ("native", "programs", "benchmarks"):
        for program in facts[kind]:
            if program["code"]:
                failures[f"{program['name']} {program['ranks']}"] = program["output"]
    for title, output in failures.items():
        end = output[-8000:].strip()
        lines += ["", f"## Failed: {title}", "", "```", end, "```"]
    return "\n".join(lines) + "\n"


def _how_it_ended(program: dict[str, Any]) -> dict[str, Any]:
    return {name: program[name] for name in ("name", "ranks", "result")}


def _of_nccl(programs: Sequence[dict[str, Any]]) -> list[str]:
    """What programs of tests/launch did by the group of torch's own."""
    if not programs:
        return []
    lines = ["", "## Programs of tests/launch by the real NCCL", ""]
    if any(program["shares_a_gpu"] for program in programs):
        lines += ["Ranks share a GPU: NCCL takes each for a host, and its speed means nothing.", ""]
    rows = [
        {
            **_how_it_ended(program),
            "seconds": program["took"],
            "what": "; ".join(program["results"]),
        }
        for program in programs
    ]
    return lines + table(rows)


@dataclass
class Report:
    """What has run so far."""

    folder: Path
    machine: dict[str, Any]
    not_run: list[str]
    stages: list[Stage] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)

    def add(self, ran: Stage | Program) -> None:
        del self.not_run[0]
        if isinstance(ran, Stage):
            self.stages.append(ran)
        else:
            self.programs.append(ran)
        self.write()

    def write(self) -> None:
        of_kind = {
            kind: [program for program in self.programs if program.kind == kind]
            for kind in (NATIVE, SCRIPT, BENCHMARK)
        }
        failures = {}
        for stage in self.stages:
            if stage.failed:
                failures[f"{stage.name} {stage.ranks or ''}"] = stage.output
        facts = {
            "machine": self.machine,
            "native": [program.facts() for program in of_kind[NATIVE]],
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
            "failures": failures,
            "programs": [program.facts() for program in of_kind[SCRIPT]],
            "benchmarks": [
                {**program.facts(), "rows": rows_of(program, self.folder)}
                for program in of_kind[BENCHMARK]
            ],
            "target_is_met": target_is_met(of_kind[BENCHMARK], self.folder),
            "not_run": self.not_run,
        }
        for name, text in (
            ("report.json", json.dumps(facts, indent=1) + "\n"),
            ("report.md", markdown(facts)),
        ):
            unfinished = self.folder / f"{name}.unfinished"
            unfinished.write_text(text)
            unfinished.replace(self.folder / name)


def say_what_is_needed(to_run: Sequence[Stage | Program]) -> bool:
    """Name the packages, and what is skipped for want of some. Returns: whether the tests can be run."""
    print(f"needed: {', '.join(NEEDED)}")
    users: dict[str, list[str]] = {}  # of each package that some programs alone need
    for program in to_run:
        if isinstance(program, Program):
            for name in program.needs:
                some = users.setdefault(name, [])
                if program.name not in some:
                    some.append(program.name)
    for name, some in users.items():
        but = "" if is_there(name) else ", which is missing"
        print(f"needed by {', '.join(some)}: {name}{but}")
    missing = [name for name in NEEDED if not is_there(name)]
    if missing:
        print(f"missing: {', '.join(missing)}. Install them, or bring them along as wheels")
    sys.stdout.flush()
    return not missing


def run(
    to_run: Sequence[Stage | Program], launcher: Launcher, report: Report, began: float
) -> None:
    """Run one stage after the other. Each has its own seconds, and the seconds that the stages before it have left.

    A stage has its own seconds also where the start took longer: torch is read from a cold disk there.

    Args: began: when this program did.
    """
    allowed = float(SECONDS_OF_START)
    for each in to_run:
        own = each.limit if isinstance(each, Stage) else each.seconds
        allowed += own
        limit = max(own, allowed - (time.monotonic() - began))
        if isinstance(each, Stage):
            each.limit = limit
            each.run()
            show(each)
        else:
            each.run(launcher, report.folder, limit)
        report.add(each)


def _end(*_: object) -> None:
    """End this process so that no rank is left behind. A second signal does not end that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def main() -> int:
    began = time.monotonic()
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    parser = argparse.ArgumentParser(prog="scripts/test-gpu", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the report")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"the real NCCL and the GPU tests of two ranks: {QUICK_SECONDS // 60} minutes on one GPU "
        f"(all: {SECONDS // 60}); several GPUs take longer",
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="the stage of this name; may be repeated"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    mpi = "Open MPI" if "MPISTRAT_TEST_OPENMPI" in os.environ else "MPICH"
    launcher = Launcher.named(mpi)
    simulated = os.environ.get(DEVICE_VARIABLE)
    gpus = [f"{simulated}:0 simulated"] if simulated else accelerators()
    with tempfile.TemporaryDirectory(prefix="mpistrat-") as scratch:
        to_run = plan(launcher, gpus, Path(scratch), quick=arguments.quick)
        if arguments.only:
            names = list(dict.fromkeys(each.name for each in to_run))
            if unknown := set(arguments.only).difference(names):
                parser.error(f"no stage is named {min(unknown)!r}. There are: {', '.join(names)}")
            wanted = arguments.only
            to_run = [each for name in wanted for each in to_run if each.name == name]
        if not say_what_is_needed(to_run):
            return 2
        not_run = [f"{each.name} {each.ranks or ''}".strip() for each in to_run]
        report = Report(folder, machine(launcher, gpus), not_run)
        report.write()
        if not gpus:
            print("no GPU that torch can use: the tests were skipped, and nothing was measured")
        elif any(isinstance(each, Program) and each.shares_a_gpu for each in to_run):
            print("Ranks share a GPU. NCCL is the real one, and how fast it is means nothing.")
        run(to_run, launcher, report, began)
    print(f"written: {folder / 'report.md'}")
    failed = any(stage.failed for stage in report.stages)
    return int(failed or any(program.code for program in report.programs))


if __name__ == "__main__":
    sys.exit(main())
