"""What the environment says of how this process was started."""

from mpistrat.cluster_resolver.how_started import (
    claim_of_launcher,
    environment_of_others,
    first_on_node,
    slurm_variables,
)

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
    claim = claim_of_launcher(ENVIRON)
    assert claim is not None
    assert (claim.size, claim.rank) == (4, 2)
    assert first_on_node(ENVIRON)
    assert claim_of_launcher({}) is None


def test_slurms_variables() -> None:
    """What lets one act as the user is left out."""
    assert slurm_variables(ENVIRON) == {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}


def test_others_are_no_ranks() -> None:
    assert "PMI_RANK" not in environment_of_others(ENVIRON)
    assert environment_of_others(ENVIRON)["HOME"] == "/home/ann"
