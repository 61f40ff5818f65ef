"""What Slurm says of job, step and task."""

from mpistrat.cluster_resolver.slurm.job import slurm_variables


def test_slurms_variables() -> None:
    """What lets one act as the user is left out."""
    environ = {
        "PMI_RANK": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_JWT": "secret",
        "SLURMD_NODENAME": "n1",
        "HOME": "/home/ann",
    }
    assert slurm_variables(environ) == {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}
