"""What scripts/mini-slurm leaves behind: nothing."""

import contextlib
from pathlib import Path

import pytest

from launch.preempted_runs import until
from support.clusters.slurm_cluster import SlurmCluster
from support.harness.mpi_launcher import Launcher

pytestmark = pytest.mark.slurm

DAEMONS = 9  # munged, slurmctld, and slurmd of seven nodes
WAITS = """\
#!/bin/bash
srun sleep 1000 &
setsid sleep 1000 &
echo has begun
wait
"""


def processes_in(folder: Path) -> list[str]:
    """The numbers of all whose working directory or an open file is in the folder, whoever has started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        links = [process / "cwd"]
        with contextlib.suppress(OSError):  # it has ended
            links += (process / "fd").iterdir()
        for link in links:
            with contextlib.suppress(OSError):
                if link.readlink().is_relative_to(folder):
                    found.append(process.name)
                    break
    return found


def test_down_ends_what_up_and_jobs_have_started_and_no_other_slurm(
    slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = SlurmCluster.start(tmp_path_factory.mktemp("down"))
    try:
        script = cluster.folder / "job"
        script.write_text(WAITS)
        job = cluster.sbatch(Launcher.named("MPICH"), script, cwd=cluster.folder)
        until(lambda: "has begun" in job.output, "the job has begun", 60)
        assert len(processes_in(cluster.folder)) > DAEMONS
    finally:
        cluster.stop()
    until(lambda: not processes_in(cluster.folder), "no process has anything open there", 5)
    assert len(processes_in(slurm.folder)) >= DAEMONS
