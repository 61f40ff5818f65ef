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
SHOWN = 20  # of the tests that were not run


def run_all(stages: Sequence[Stage]) -> None:
    """In their order; those that may stand beside others by threes."""
    for beside_others, some in groupby(stages, key=lambda stage: stage.beside_others):
        with ThreadPoolExecutor(max_workers=SIDE_BY_SIDE if beside_others else 1) as pool:
            list(pool.map(_run, some))


def _run(stage: Stage) -> None:
    stage.run()
    report.show(stage)


def runs_of(stages: Sequence[Stage]) -> dict[manifest.Place, set[str]]:
    """Where each test was run."""
    runs: dict[manifest.Place, set[str]] = {}
    for stage in stages:
        runs.setdefault((stage.mpi, stage.ranks), set()).update(stage.results)
    return runs


def complaints(mode: str, stages: Sequence[Stage]) -> Iterator[str]:
    """What is wrong with a run as a whole."""
    unsteady = [test for stage in stages for test in stage.unsteady]
    if len(unsteady) > UNSTEADY_AT_MOST:
        yield f"{len(unsteady)} tests are unsteady, more than {UNSTEADY_AT_MOST}"
    if mode in ("quick", "xla"):
        return
    entries = manifest.load()
    if matrix.XLA_PREFIX not in os.environ:
        entries = [entry for entry in entries if not entry.test.startswith("tests/tpu/")]
    runs = runs_of(stages)
    missing = manifest.lacking(entries, runs, full=mode == "full")
    yield from (f"in tests/manifest, but {text}" for text in missing[:SHOWN])
    if len(missing) > SHOWN:
        yield f"and {len(missing) - SHOWN} more of tests/manifest"
    if new := manifest.unlisted(entries, runs):
        yield (
            f"{len(new)} tests are not in tests/manifest, such as {new[0]}; "
            "scripts/test manifest adds them"
        )


def update_manifest() -> int:
    """Collect all tests, and add those that are new."""
    everything = [stage for stage in matrix.stages("full") if stage.pytest]
    for stage in everything:
        stage.pytest = [*stage.pytest, "--collect-only"]
    run_all(everything)
    if any(stage.failed for stage in everything):
        return 1
    slow = {
        result.test
        for stage in everything
        for result in stage.results.values()
        if result.text == "slow"
    }
    before = manifest.load()
    runs = runs_of(everything)
    after = manifest.with_new(before, runs, slow)
    manifest.save(after)
    print(f"{len(after) - len(before)} new tests in tests/manifest")
    for text in manifest.lacking(after, runs, full=True):
        print(f"in tests/manifest, but {text}")
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
