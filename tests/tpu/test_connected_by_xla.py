"""What XLA records where it connects the ranks, as on a TPU with one rank per chip. No such graph runs here."""

import json
from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "connected_by_xla.py"


def test_sums_are_in_the_step_and_start_at_once_outside() -> None:
    """Also where the program has used the device, or has asked for the world's size, before the strategy is made."""
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    mpich = Launcher.named("MPICH")
    job = mpich.run_python(2, PROGRAM, env=environment, seconds=60, forked=True)
    assert job.returncode == 0, job.output
    answers = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == 2
    for answer in answers:
        assert answer["by XLA"]
        assert answer["world"] == 2
        assert min(answer["all-reduces in the step, of gradients and of a value"]) > 0
        # Of each of two means: the operand, the sum alone, and the result. None overwrites what others need.
        of_a_mean = [[0, False, False], [1, False, False], [0, False, False]]
        assert answer["started: all-reduces, wait, sync_xla_data"] == of_a_mean * 2
        assert answer["pending: three results, another tensor"] == [False] * 3 + [True]
        of_two_cores, of_spmd = answer["not connected"]
        assert "one of the rank's 2 cores" in of_two_cores
        assert "torch_xla.runtime.use_spmd()" in of_spmd
