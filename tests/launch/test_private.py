"""Other users can read nothing that a job writes, though its umask would let them; and it opens no port."""

from pathlib import Path

from support.harness.mpi_launcher import Launcher

PROGRAM = Path(__file__).parent / "programs" / "private.py"
OPEN_TO_OTHERS = 0o077


def test_a_job_with_an_open_umask(launcher: Launcher, tmp_path: Path) -> None:
    """Trace, measured costs, records in memory, the report of a killed rank, and checkpoints."""
    settings = {
        "MPISTRAT_TRACE": str(tmp_path / "traces" / "run1"),
        "MPISTRAT_CACHE": str(tmp_path / "cache" / "costs"),
        "MPISTRAT_STALL_SECONDS": "20",
    }
    job = launcher.run_python(2, PROGRAM, tmp_path, env=settings, cwd=tmp_path, seconds=60)
    assert job.returncode != 0
    assert job.left_behind == (), job.output
    assert "files in memory, readable: []" in job.stdout, job.output
    assert "observers listen on [set()]" in job.stdout, job.output
    for rank in range(2):
        assert f"rank {rank} listens on [] of its own" in job.stdout, job.output

    written = list(tmp_path.rglob("*"))
    names = [path.name for path in written]
    assert any(name.startswith("mpistrat-report-") for name in names), job.output
    assert {"rank-0.part", "rank-1.part", "checkpoints"} <= set(names)
    readable = [str(path) for path in written if path.stat().st_mode & OPEN_TO_OTHERS]
    assert readable == []
