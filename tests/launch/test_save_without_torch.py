"""A save compares the variables of a program without torch, too: `programs/save_without_torch.py`."""

from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs/save_without_torch.py"


def test_a_save_compares_variables(launcher: Launcher, tmp_path: Path) -> None:
    job = launcher.run_python(2, PROGRAM, tmp_path / "saved")
    assert job.returncode == 0, job.output
    for rank in range(2):
        assert job.output.count(f"rank {rank} has saved") == 1, job.output
        path = tmp_path / "saved" / "step-00000002"
        begin = f"rank {rank} says: the checkpoint {path} has rank 0's values, and is marked as differing: "
        text = f"{begin}variable 'weights' is not the same any more on all ranks"
        assert job.output.count(text) == 1, job.output
    assert "rank 1: 3 of 3 elements, most at [0]: 3 instead of 2 on rank 0" in job.output
