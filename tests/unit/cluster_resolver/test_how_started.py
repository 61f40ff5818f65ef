"""What the environment says of how this process was started."""

from mpistrat.cluster_resolver.launcher import (
    environment_of_children,
    is_first_on_node,
    read_claim,
)
from mpistrat.cluster_resolver.slurm.job import slurm_variables

ENVIRON = {
    "PMI_SIZE": "4",
    "PMI_RANK": "2",
    "MPI_LOCALRANKID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_JWT": "secret",
    "SLURMD_NODENAME": "n1",
    "HOME": "/home/ann",
}


def test_claim() -> None:
    claim = read_claim(ENVIRON)
    assert claim is not None
    assert (claim.size, claim.rank) == (4, 2)
    assert is_first_on_node(ENVIRON)
    assert read_claim({}) is None


def test_slurms_variables() -> None:
    """What lets one act as the user is left out."""
    assert slurm_variables(ENVIRON) == {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


def test_others_are_no_ranks() -> None:
    assert "PMI_RANK" not in environment_of_children(ENVIRON)
    assert environment_of_children(ENVIRON)["HOME"] == "/home/ann"
