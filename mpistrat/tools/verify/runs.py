"""Starts the program on one rank or on several ranks, each time in a fresh folder, and reads the recordings."""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from mpistrat.tools.doctor.children import ask, last_words
from mpistrat.tools.doctor.mpi_library import command_of_ranks
from mpistrat.tools.verify import working_folder
from mpistrat.tools.verify.comparison import Run

_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    # Unlike hash seeds let sets of ranks differ. A single rank is compared with itself.
    "PYTHONHASHSEED": "random",
    # Open MPI 5 and 4 start more ranks than there are cores.
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


class FailedRunError(Exception):
    """There is no run to compare. The text ends with the program's last lines."""


def start(asked: Namespace, ranks: int, *kinds: str) -> Run:
    """Run a program up to the last step to record, and return the recordings of all ranks.

    Args:
        asked: the options of the command line, with `launch`, the launcher, and `folder`, a folder for all runs.
        ranks: number of ranks. One rank runs the program `asked.against`, if there is one.
        kinds: "shaken", "gloo" and "whole": arguments of `rank_process.main`.
    Raises: FailedRunError.
    """
    script = asked.script
    failure = f"the run on {ranks} ranks failed"
    command = [sys.executable, "-m"]
    environment = dict(_ENVIRONMENT)
    if ranks == 1:
        failure = "the program runs on several ranks, and refuses 1 rank, so there is nothing to compare with"
        script = asked.against or script
        environment["PYTHONHASHSEED"] = "1"
    else:
        launcher = command_of_ranks(asked.launch)
        if launcher == [""]:
            raise FailedRunError("there is no mpirun and no srun: load the module of your MPI")
        command = [*launcher, "-n", str(ranks), *command]
    if asked.by_run:
        keeps = ["--keep-backend"] if "gloo" in kinds else []
        command += ["mpistrat", "run", *keeps, "-m"]
    folder = tempfile.mkdtemp(dir=asked.folder)
    files = Path(folder, "files")
    files.mkdir()
    working_folder.fill(files, Path.cwd())
    program = [os.path.abspath(script), *asked.arguments]
    arguments = {"program": program, "steps": asked.steps, "folder": folder}
    arguments |= dict.fromkeys(kinds, True)
    command += ["mpistrat.tools.verify.rank_process", json.dumps(arguments)]
    output = ask(command, asked.seconds, environment)
    found = _recordings_in(files.parent)
    if output.ended or len(found) < ranks:
        words = last_words(output.errors or output.output)
        raise FailedRunError(f"{failure} ({output.ended or 'exit code 0'}): {words}")
    if not all(recording.steps for recording in found):
        raise FailedRunError(
            "no optimizer of torch has made a step, and no variable was assigned. Give a program that trains"
        )
    return sorted(found, key=lambda recording: recording.rank)


def _recordings_in(folder: Path) -> Run:
    """Read the recordings of a run. Raises: FailedRunError if the program wanted to overwrite a file."""
    found: Run = []
    for file in folder.glob("*.recording"):
        recording = pickle.loads(file.read_bytes())
        if recording.refused:
            raise FailedRunError(
                f"the program wants to write {recording.refused}, which was there before the run: give it another "
                "path, or move the file away"
            )
        found.append(recording)
    return found
