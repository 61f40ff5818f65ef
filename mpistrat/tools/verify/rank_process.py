"""One rank of a run: it runs the program, records its steps, and ends it after the last step to record.

Started by: `runs.Runs.start`, with the arguments of `main` as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.cluster_resolver.launcher import read_claim
from mpistrat.tools.verify.recording import Recording, Step
from mpistrat.tools.verify.variable_rounds import VariableRounds
from mpistrat.tools.verify.working_folder import FileGuard


class StepRecorder:
    """Keeps the steps of this rank, and ends the program after the last one.

    Args: most: number of steps to record.   shaken: whether this is the control.
    """

    def __init__(self, most: int, *, shaken: bool) -> None:
        claim = read_claim()
        self.recording = Recording((claim and claim.rank) or 0)
        self._most = most
        self._rounds: list[Step] = []
        self._variables = VariableRounds(self.recording, self._end_round, shaken=shaken)
        self._variables.watch()
        # As in a job without seeds. Rank 0 has the numbers of the run on one rank.
        seed = self.recording.rank
        random.seed(seed)
        np.random.seed(seed)
        if importlib.util.find_spec("torch"):
            import torch

            from mpistrat.tools.verify.torch_steps import TorchSteps

            torch.manual_seed(seed)
            TorchSteps(self.recording, self._end_step, shaken=shaken).watch()

    def finish(self) -> Recording:
        """Return the recording: the steps of optimizers, or else the rounds of variables."""
        if not self.recording.steps:
            self._most = sys.maxsize
            self._variables.finish()
            self.recording.steps = self._rounds
        return self.recording

    def _end_step(self, step: Step) -> None:
        self.recording.steps.append(step)
        if len(self.recording.steps) >= self._most:
            raise SystemExit(0)

    def _end_round(self, step: Step) -> None:
        self._rounds.append(step)
        if not self.recording.steps and len(self._rounds) >= self._most:
            raise SystemExit(0)


def main(
    program: list[str],
    steps: int,
    folder: str,
    shaken: bool = False,
    gloo: bool = False,
    whole: bool = False,
) -> None:
    """Run `program`, and write the recording into `folder`.

    Args:
        program: path of the script, and its arguments.
        steps: number of steps to record.
        folder: the folder of the run; its subfolder `files` is the working folder.
        shaken: whether the numbers are changed by rounding.
        gloo: whether the default process group of torch is of gloo.
        whole: whether each rank computes whole batches.
    """
    if whole:
        _leave_batches_whole()
    if gloo:
        _use_gloo()
    recorder = StepRecorder(steps, shaken=shaken)
    work = os.path.join(folder, "files")
    os.chdir(work)
    sys.argv = program
    sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    guard = FileGuard(work)
    try:
        runpy.run_path(program[0], run_name="__main__")
    finally:
        guard.is_on = False
        recording = recorder.finish()
        recording.refused = guard.refused
        recording.outside = guard.outside
        Path(folder, f"{recording.rank}.recording").write_bytes(pickle.dumps(recording))


def _use_gloo() -> None:
    import torch.distributed

    original = torch.distributed.init_process_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        original("gloo", *args, **kwargs)

    torch.distributed.init_process_group = init_process_group


def _leave_batches_whole() -> None:
    """Give each replica the whole of each batch, and all losses the same weight."""
    from mpistrat.input import shards, splitting
    from mpistrat.replicas.given_steps import GivenSteps

    def bounds(batch_size: int, piece: int, num_pieces: int) -> tuple[int, int]:
        return 0, batch_size

    def begin_backward(steps: GivenSteps, *, weighs: bool) -> None:
        return None

    for owner, name, function in (
        (shards, "slice_bounds", bounds),
        (splitting, "slice_bounds", bounds),
        (GivenSteps, "begin_backward", begin_backward),
    ):
        setattr(owner, name, function)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
