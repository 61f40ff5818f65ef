"""`mpistrat verify`: runs the program on one rank and on several, and says where they first part."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpistrat.tools.doctor.facts import Launch
from mpistrat.tools.verify import report
from mpistrat.tools.verify.causes import Evidence, causes_of, needs_whole_batches
from mpistrat.tools.verify.comparison import compare, is_repeatable
from mpistrat.tools.verify.recording import Recording
from mpistrat.tools.verify.runs import FailedRunError, OverwritingRunError, Runs

EQUAL = 0
DIFFERENT = 1
NOT_COMPARED = 2


def run(
    program: Sequence[str],
    launch: Launch,
    *,
    against: str | None = None,
    by_run: bool = False,
    ranks: int = 2,
    steps: int = 20,
    seconds: float = 600.0,
) -> int:
    """Run the program, compare, and print the verdict in at most 15 lines.

    Args:
        program: the path of the script, and its arguments.
        launch: the facts of this process's launcher and of Slurm.
        against: the path of the program for one process that the script came from; None: the script itself.
        by_run: whether the script is started as `mpistrat run` does.
        ranks, steps: how many ranks to compare with one, and how many steps.
        seconds: the longest time of each run.
    Returns: the exit code: 0 only if the runs are equal up to rounding; 1 if they differ; 2 if nothing was compared.
    """
    script, *arguments = program
    program = [os.path.abspath(script), *arguments]
    alone = [os.path.abspath(against or script), *arguments]
    # The nodes of an allocation share the user's folders, and not those for temporary files.
    place = os.getcwd() if launch.slurm else None
    with tempfile.TemporaryDirectory(prefix=".mpistrat-verify-", dir=place) as folder:
        runs = Runs(launch, Path(folder), steps, seconds, by_run)
        try:
            lines, code = _verdict(runs, program, alone, ranks)
        except FailedRunError as error:
            text = str(error).rstrip(".")
            lines = [f"NOT COMPARED: {text}."]
            code = NOT_COMPARED
    print("\n".join(lines))
    return code


def _verdict(runs: Runs, program: list[str], alone: list[str], ranks: int) -> tuple[list[str], int]:
    """Return the lines of the verdict, and the exit code. Raises: FailedRunError.

    Args: alone: the program that is right by definition, and its arguments.
    """
    reference = _on_one_rank(runs, program, alone, ranks)
    found = runs.start("ranks", program, ranks)
    is_ported = alone != program
    if runs.by_run and not is_ported and not _have_same_batches(reference, found):
        reference = runs.start("gloo", program, ranks, gloo=True)
    count = len(reference)
    control = runs.start("control", alone, count, gloo=count > 1, shaken=True)
    if not is_repeatable(reference[0], control[0]):
        raise FailedRunError(
            "two runs on 1 rank differ by more than rounding; seed all random numbers of the program"
        )
    verdict = compare(reference, control[0], found)
    if verdict.steps == 0 and verdict.difference is None:
        raise FailedRunError("rounding alone changes the first step beyond recognition")
    if verdict.difference is None:
        if {len(rank.steps) for rank in found} != {len(reference[0].steps)}:
            return report.other_number_of_steps(reference, found), DIFFERENT
        return report.equal(verdict, reference, found), EQUAL
    evidence = Evidence(verdict.difference, reference, found)
    if not runs.by_run and needs_whole_batches(evidence):
        whole = runs.start("whole", program, ranks, whole=True)
        evidence = dataclasses.replace(evidence, whole=whole)
    return report.different(evidence, causes_of(evidence)), DIFFERENT


def _on_one_rank(runs: Runs, program: list[str], alone: list[str], ranks: int) -> list[Recording]:
    """Run the program on one rank. Raises: FailedRunError; its text says if only several ranks run the program."""
    try:
        return runs.start("one", alone, 1)
    except OverwritingRunError:
        raise
    except FailedRunError as failure:
        if "torch.distributed" in str(failure) and not runs.by_run:
            raise FailedRunError(f"{failure}. It uses torch.distributed: try --run") from None
        error = failure
    if alone == program:
        with contextlib.suppress(FailedRunError):
            runs.start("ranks of a program that refuses one", program, ranks)
            error = FailedRunError(
                f"the program refuses 1 rank, and runs on {ranks}, so there is no run to compare with: {error}"
            )
    raise error


def _have_same_batches(reference: list[Recording], ranks: list[Recording]) -> bool:
    """Whether the first batches of all ranks together are as large as the first batch of one rank."""
    counts = [len(rank.steps[0].examples) for rank in ranks]
    return len(reference[0].steps[0].examples) == sum(counts)
