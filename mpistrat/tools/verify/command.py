"""`mpistrat verify`: runs the program on one rank and on several, and says where they first part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from argparse import Namespace

from mpistrat.tools.verify.causes import cause_of_split, causes_of, other_data
from mpistrat.tools.verify.comparison import Verdict, compare
from mpistrat.tools.verify.report import text_of
from mpistrat.tools.verify.runs import FailedRunError, start


def run(asked: Namespace) -> int:
    """Run the program, compare, and print the verdict in at most 15 lines.

    Args: asked: the options of the command line, with `launch`, the facts of this process's launcher and of Slurm.
    Returns: the exit code: 0 only if the runs are equal up to rounding; 1 if they differ; 2 if nothing was compared.
    """
    # The nodes of an allocation share the user's folders, and not the folders for temporary files.
    place = os.getcwd() if asked.launch.slurm else None
    with tempfile.TemporaryDirectory(prefix=".mpistrat-verify-", dir=place) as asked.folder:
        try:
            found, causes = _judged(asked)
        except FailedRunError as error:
            print(f"NOT COMPARED: {error}.")
            return 2
    print(text_of(found, causes))
    return 0 if found.outcome == "equal" else 1


def _judged(asked: Namespace) -> tuple[Verdict, list[str]]:
    """Return the verdict, and the causes of a difference. Raises: FailedRunError."""
    ranks = start(asked, asked.n)
    reference = start(asked, 1)
    kinds = []
    batches = [len(rank.steps[0].examples) for rank in reference + ranks]
    is_split = batches[0] == sum(batches[1:])
    if asked.by_run and not asked.against and not is_split:
        kinds = ["gloo"]
        reference = start(asked, asked.n, "gloo")
    control = start(asked, len(reference), "shaken", *kinds)[0]
    found = compare(reference, control, ranks)
    if found.number == 0:
        raise FailedRunError(
            "two runs on 1 rank differ by more than a hundredth in the first step. Seed all random numbers of the "
            "program; if rounding changes it so much, compare in float64, or with larger batches"
        )
    if found.outcome != "tensor":
        return found, []
    _check_parts(found)
    causes = causes_of(found)
    if found.kind == "gradients" and not causes and not asked.by_run:
        with contextlib.suppress(FailedRunError):
            whole = start(asked, asked.n, "whole")
            causes = cause_of_split(found, compare(reference, control, whole))
    return found, causes or ["No fact tells the causes apart."]


def _check_parts(found: Verdict) -> None:
    """Raise FailedRunError if ranks have other batches, or other parts of the model, on purpose."""
    if found.ranks[0].by_files and other_data(found):
        raise FailedRunError(
            "each rank reads files of its own, and so has batches of its own. Compare a program in which all ranks "
            "read the same data"
        )
    sizes = {sample.size for sample in found.samples(found.reference + found.ranks)}
    if found.kind == "before" and len(sizes) > 1:
        raise FailedRunError(
            "the sizes of parameters differ: the model is sharded, or the programs have unlike models. Compare the "
            "whole model, on few ranks"
        )
