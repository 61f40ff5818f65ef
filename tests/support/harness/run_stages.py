"""Runs every stage of scripts/test or test-tpu, whatever the ones before it did, and adds them up."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

from support.harness import manifest, matrix, report
from support.harness.stage import Stage

UNSTEADY_AT_MOST = 1  # so many may fail at first; more are a failure of the run
SIDE_BY_SIDE = 3  # on two cores: each of them waits now and then


def run_all(stages: Sequence[Stage]) -> None:
    """In their order; those that may stand beside others by threes."""
    for beside_others, some in groupby(stages, key=lambda stage: stage.beside_others):
        with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE if beside_others else 1) as pool:
            list(pool.map(_run, some))


def _run(stage: Stage) -> None:
    stage.run()
    report.show(stage)


def complaints(mode: str, stages: Sequence[Stage]) -> Iterator[str]:
    """What is wrong with a run as a whole."""
    unsteady = [test for stage in stages for test in stage.unsteady]
    if len(unsteady) > UNSTEADY_AT_MOST:
        yield f"{len(unsteady)} tests are unsteady, more than {UNSTEADY_AT_MOST}"
    if mode in ("quick", "xla"):
        return
    expected = manifest.load()[mode]
    if matrix.XLA_PREFIX not in os.environ:
        titles = [title for title in expected if not matrix.needs_xla(title)]
        expected = {title: expected[title] for title in titles}
    for text in manifest.differences(expected, manifest.numbers_of(stages)):
        yield f"{text}; scripts/test manifest writes the number that is right"


def update_manifest() -> int:
    """Collect all tests, and write how many each stage has."""
    numbers: dict[str, manifest.Numbers] = {}
    for mode in manifest.MODES:
        stages = [stage for stage in matrix.stages(mode) if stage.pytest]
        for stage in stages:
            stage.pytest = [*stage.pytest, "--collect-only"]
        run_all(stages)
        if any(stage.failed for stage in stages):
            return 1
        numbers[mode] = manifest.numbers_of(stages)
    before = manifest.load()
    for mode in manifest.MODES:
        for text in manifest.differences(before[mode], numbers[mode]):
            print(f"{mode}: {text}")
    manifest.save(numbers)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/test", description=__doc__)
    modes = [*matrix.MODES, "manifest"]
    parser.add_argument("mode", choices=modes, nargs="?", default="usual")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep stages and tests there")
    arguments = parser.parse_args()
    if arguments.mode == "manifest":
        return update_manifest()

    began = time.monotonic()
    stages = list(matrix.stages(arguments.mode))
    run_all(stages)
    seconds = time.monotonic() - began
    report.show_stages(stages, seconds)
    report.show_slowest(stages)
    if arguments.json:
        report.save(arguments.json, arguments.mode, stages, seconds)
    if arguments.mode != "quick" and matrix.XLA_PREFIX not in os.environ:
        here = f"Python {platform.python_version()} on {platform.machine()}"
        print(f"left out: tests/tpu: torch_xla has no release for {here}")
    for test in (test for stage in stages for test in stage.unsteady):
        print(f"unsteady: {test} failed, and passed when it was run again")
    wrong = list(complaints(arguments.mode, stages))
    for complaint in wrong:
        print(f"FAILED  {complaint}")
    passed, failed, skipped = (
        sum(getattr(stage, what) for stage in stages) for what in ("passed", "failed", "skipped")
    )
    failed += len(wrong)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
