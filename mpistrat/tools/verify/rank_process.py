"""One rank of a run: it runs the program, records its steps, and ends it after the last step to record.

Started by: `runs.Runs.start`, with the arguments of `main` as JSON.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mpistrat.cluster_resolver.launcher import read_claim
from mpistrat.input import shards, splitting
from mpistrat.replicas.given_steps import GivenSteps
from mpistrat.tools.verify import variable_rounds, working_folder
from mpistrat.tools.verify.recording import Recording


def main(
    program: list[str],
    steps: int,
    folder: str,
    shaken: bool = False,
    gloo: bool = False,
    whole: bool = False,
) -> None:
    """Run `program`, and write the recording into `folder`, also if the program raises an error.

    Afterwards the process is of no other use: it has another working folder, other `sys.argv`, and modules that were
    changed to record steps.

    Args:
        program: absolute path of the script, and its arguments.
        steps: number of steps to record.
        folder: absolute path of the run's folder; its subfolder `files` is the working folder.
        shaken: whether the numbers are changed by rounding.
        gloo: whether the default process group of torch is of gloo.
        whole: whether each rank computes whole batches.
    """
    claim = read_claim()
    recording = Recording((claim and claim.rank) or 0)
    # Unlike seeds, as in a job without seeds. Rank 0 has the numbers of the run on one rank.
    random.seed(recording.rank)
    np.random.seed(recording.rank)
    rounds = variable_rounds.watch(recording, steps, shaken)
    if find_spec("torch"):
        from mpistrat.tools.verify import torch_steps

        torch_steps.watch(recording, steps, shaken=shaken)
        if gloo:
            torch_steps.use_gloo()
    if whole:  # each replica gets all of each batch, and all losses count alike
        for module in (splitting, shards):
            module.slice_bounds = lambda batch_size, piece, num_pieces: (0, batch_size)  # type: ignore[attr-defined]
        GivenSteps.begin_backward = lambda steps, weighs: None  # type: ignore
    for earlier in Path(folder).parent.glob("*/*.recording"):
        recording.outside |= pickle.loads(earlier.read_bytes()).outside
    os.chdir(f"{folder}/files")
    sys.argv = program
    script = os.path.realpath(program[0])
    sys.path[0] = os.path.dirname(script)
    working_folder.guard(recording, folder)
    try:
        runpy.run_path(program[0], run_name="__main__")
    finally:
        recording.steps = recording.steps or rounds
        # Temporary files are gone.
        recording.outside = {path for path in recording.outside if os.path.exists(path)}
        Path(folder, f"{recording.rank}.recording").write_bytes(pickle.dumps(recording))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
