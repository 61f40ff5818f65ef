"""What of the environment changes how fast MPI is."""

from mpistrat.settings import transport_settings


def test_settings() -> None:
    """Not what a launcher tells each job or rank."""
    ours = {"FI_PROVIDER": "cxi", "OMPI_MCA_btl": "tcp,self", "UCX_TLS": "tcp"}
    others = {
        "HOME": "/home/ann",
        "OMPI_MCA_ess_base_jobid": "1",
        "PMI_RANK": "0",
        "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "node7",
    }
    assert transport_settings({**others, **ours}) == ours
