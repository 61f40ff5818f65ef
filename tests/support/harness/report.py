"""What a run of scripts/test shows of its stages, and keeps of them."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from support.harness.result_lines import Result
from support.harness.stage import Stage

SLOWEST = 30
SECONDS_OF_A_LONG_TEST = 20.0  # one that takes longer says why it cannot be shorter


def show(stage: Stage) -> None:
    """A failed stage in full; of the others their last line."""
    mark = "FAILED" if stage.failed else "ok"
    lines = stage.output.strip().splitlines()
    if stage.pytest:  # after pytest's last line a launcher may write lines of its own
        lines = [line for line in lines if re.search(r" in [0-9.]+s\b", line)]
    if stage.failed or stage.unsteady:
        width = shutil.get_terminal_size((100, 24)).columns
        print(f" {stage.title} ".center(width, "="))
        print(stage.output.strip())
    last = lines[-1] if lines else ""
    print(f"{mark:6}  {stage.title:24}  {stage.seconds:6.1f} s  {last}", flush=True)


def show_stages(stages: Sequence[Stage], seconds: float) -> None:
    """A row for each stage; `seconds` is what all took, of which some stood side by side."""
    print("\nstage        MPI       ranks  passed  failed  seconds")
    for stage in stages:
        mpi = stage.mpi or "-"
        ranks = stage.ranks or "-"
        passed = stage.passed if stage.pytest else ""
        counts = f"{passed:>8}{stage.failed:>8}{stage.seconds:>9.1f}"
        print(f"{stage.name:<13}{mpi:<10}{ranks:>5}{counts}")
    print(f"{'all':<28}{'':>16}{seconds:>9.1f}")


def show_slowest(stages: Sequence[Stage]) -> None:
    """The slowest tests; idle are the seconds in which their processes computed nothing."""
    ran = [(result, stage) for stage in stages for result in stage.results.values()]
    ran.sort(key=lambda pair: -pair[0].seconds)
    print(f"\n{'seconds':>8}{'idle':>8}  the {SLOWEST} slowest tests")
    for result, stage in ran[:SLOWEST]:
        where = f"  ({stage.mpi} {stage.ranks})" if stage.ranks else ""
        seconds = f"{result.seconds:>8.1f}{result.idle:>8.1f}"
        print(f"{seconds}  {result.test}{where}")
        if result.seconds > SECONDS_OF_A_LONG_TEST:
            print(f"{'':>18}{result.why_long or '@pytest.mark.long(why) is missing'}")
    print()


def save(file: Path, mode: str, stages: Sequence[Stage], seconds: float) -> None:
    """Everything, as JSON: the stages, and of each its tests with outcome, seconds, CPU seconds and idle seconds."""

    def of_test(result: Result) -> dict[str, object]:
        kept = asdict(result)
        for name in ("text", "why_long"):
            if not kept[name]:
                del kept[name]
        return {**kept, "idle": round(result.idle, 3)}

    rows = [
        {
            "stage": stage.name,
            "mpi": stage.mpi,
            "ranks": stage.ranks,
            "seconds": round(stage.seconds, 3),
            "passed": stage.passed,
            "failed": stage.failed,
            "skipped": stage.skipped,
            "unsteady": stage.unsteady,
            "tests": [of_test(result) for result in stage.results.values()],
        }
        for stage in stages
    ]
    kept = {"mode": mode, "seconds": round(seconds, 3), "stages": rows}
    file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
