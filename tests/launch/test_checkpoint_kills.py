"""Jobs killed while they write checkpoints: one that is whole is always there, and the next job goes on from it."""

from pathlib import Path

import pytest

from launch.programs.checkpointing import CommonState, OwnState
from mpistrat.checkpoint.directory import Directory
from mpistrat.checkpoint.stored_checkpoint import StoredCheckpoint
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.both_mpis("faults")

PROGRAM = Path(__file__).parent / "programs" / "checkpointing.py"
RANKS = 2
SECONDS = 60.0  # for a job, on a busy machine


@pytest.mark.parametrize(
    "kills", [3, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.time_limit(3600)])]
)
def test_kill_9_while_writing(launcher: Launcher, tmp_path: Path, kills: int) -> None:
    directory = tmp_path / "saved"
    steps = [0]
    found_something = unfinished = 0
    for seed in range(kills):
        job = launcher.run_python(
            *(RANKS, "-W", "error::UserWarning", PROGRAM, directory, str(seed)),
            seconds=SECONDS,
            cwd=tmp_path,
        )
        assert job.returncode != 0, job.output
        assert "Traceback" not in job.output, job.output
        assert job.left_behind == ()
        steps.append(newest_step(directory, steps[-1]))
        found_something += steps[-1] > steps[-2]
        unfinished += any(directory.glob(".unfinished-*"))
    print(
        f"{launcher.name}: {kills} kills, {steps[-1]} steps saved, {unfinished} kills left one unfinished"
    )
    assert found_something >= max(1, kills // 10)
    assert unfinished >= kills // 10


def newest_step(directory: Path, before: int) -> int:
    """The step of the newest checkpoint, of whose files each byte is right; none that was there is lost."""
    whole, wrong = Directory(directory).checkpoints()
    assert wrong == []
    assert len(whole) <= 3
    if not whole:
        assert before == 0
        return 0
    for path, manifest in whole:
        assert manifest.ranks == RANKS
        stored = StoredCheckpoint(path, {"common": None})
        stored.verify_ranks(0, 1)
        common, own = CommonState(), OwnState(0)
        common.load_state_dict(stored.state["common"]["common"])
        own.load_rank_state_dicts(
            {rank: state["own"] for rank, state in stored.state["ranks"].items()}
        )
        assert common.step == own.step == manifest.step
    assert manifest.step >= before
    return manifest.step
