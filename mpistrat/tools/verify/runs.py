"""Starts the program on one rank and on several ranks, each time in a fresh folder, and reads the recordings."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpistrat.cluster_resolver.launcher import OPEN_MPI, environment_of_children
from mpistrat.tools.doctor.children import ask, last_words
from mpistrat.tools.doctor.facts import Launch
from mpistrat.tools.doctor.mpi_library import command_family
from mpistrat.tools.verify import working_folder
from mpistrat.tools.verify.recording import Recording

_RANK = "mpistrat.tools.verify.rank_process"


class FailedRunError(Exception):
    """A run of the program failed. The text ends with the program's last lines."""


class OverwritingRunError(FailedRunError):
    """The program wanted to overwrite a file."""


@dataclass(frozen=True)
class Runs:
    """Starts runs.

    Attributes:
        launch: the launcher and the commands of this machine.
        folder: holds a folder for each run.
        steps: number of steps that a run records.
        seconds: the longest time of a run.
        by_run: whether the program is started as `mpistrat run` does.
    """

    launch: Launch
    folder: Path
    steps: int
    seconds: float
    by_run: bool

    def start(
        self, name: str, program: Sequence[str], ranks: int, **kinds: bool
    ) -> list[Recording]:
        """Run `program` up to the last step to record, and return the recordings of all ranks.

        Args:
            name: a name for the folder of the run.
            program: the absolute path of the script, and its arguments.
            ranks: number of ranks; 1 without a launcher.
            kinds: `shaken`, `gloo` and `whole` of `rank_process.main`.
        Raises: FailedRunError.
        """
        folder = self.folder / name
        work = folder / "files"
        work.mkdir(parents=True)
        working_folder.fill(work, Path.cwd())
        asked = {"program": program, "steps": self.steps, "folder": str(folder), **kinds}
        words = [sys.executable, "-m", _RANK]
        if self.by_run:
            keeps = ["--keep-backend"] if kinds.get("gloo") else []
            words = [sys.executable, "-m", "mpistrat", "run", *keeps, "-m", _RANK]
        if ranks > 1:
            words = [*launcher_words(self.launch, ranks), *words]
        environment = environment_of_children()
        environment["TORCHDYNAMO_DISABLE"] = "1"
        # Unlike hash seeds let sets of ranks differ. A single rank is compared with itself.
        environment["PYTHONHASHSEED"] = "1" if ranks == 1 else "random"
        output = ask([*words, json.dumps(asked)], self.seconds, environment)
        found = [pickle.loads(file.read_bytes()) for file in folder.glob("*.recording")]
        for recording in found:
            if recording.refused:
                raise OverwritingRunError(
                    f"the program wants to write {recording.refused}, which was there before the run: give it another "
                    "path, or move the file away"
                )
        if output.ended or len(found) < ranks:
            last = last_words(output.errors) or last_words(output.output)
            ended = output.ended or f"{len(found)} ranks have ended as Python does"
            raise FailedRunError(f"the run on {ranks} ranks failed ({ended}): {last}")
        if not all(recording.steps for recording in found):
            raise FailedRunError(
                "the program has called step() of no optimizer of torch, and has assigned no variable: there is "
                "nothing to compare"
            )
        return sorted(found, key=_rank)


def _rank(recording: Recording) -> int:
    return recording.rank


def launcher_words(launch: Launch, ranks: int) -> list[str]:
    """Return the words that start `ranks` ranks: those of srun inside an allocation, else those of mpirun.

    Raises: FailedRunError if there is neither.
    """
    is_open_mpi = command_family(launch.mpirun_version) == OPEN_MPI
    for kind in ("pmix",) if is_open_mpi else ("pmi2", "pmix"):
        if kind in launch.srun_types:
            return ["srun", f"--mpi={kind}", "-n", str(ranks)]
    if not launch.mpirun:
        raise FailedRunError("there is no mpirun and no srun: load the module of your MPI")
    more = ["--map-by", ":OVERSUBSCRIBE"] if is_open_mpi else []
    return [launch.mpirun, *more, "-n", str(ranks)]
