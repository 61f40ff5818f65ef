import pytest

from mpistrat.cluster_resolver.launcher import FT_ENABLE, why_not_fault_tolerant

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI\0"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: ..."


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_open_mpi_that_was_told_to(value: str) -> None:
    assert why_not_fault_tolerant(OPEN_MPI, {FT_ENABLE: value}) == ""


@pytest.mark.parametrize("environ", [{}, {FT_ENABLE: "0"}, {FT_ENABLE: "false"}])
def test_open_mpi_that_was_not(environ: dict[str, str]) -> None:
    assert "mpirun --with-ft ulfm" in why_not_fault_tolerant(OPEN_MPI, environ)


def test_another_mpi() -> None:
    reason = why_not_fault_tolerant(MPICH, {FT_ENABLE: "1"})
    assert reason.startswith("MPICH 5.0.2 does not")
