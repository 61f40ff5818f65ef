"""MPIClusterResolver where no MPI may be loaded; the rest is in tests/mpi and tests/launch."""

import os
import subprocess
import sys

import pytest

# On a machine with an MPI of its own, this process may have become a rank, and says so to its children by MPISTRAT_.
LAUNCHERS = ("PMI", "OMPI", "MPI4PY", "SLURM", "MPISTRAT_")


def python(program, **variables):
    """In a process of its own, that finds no libmpi and was started by no launcher."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    program = "import sys; sys.modules['mpi4py.MPI'] = None\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, **variables},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_building_one_loads_no_mpi():
    code, out, err = python(
        "from mpistrat.cluster_resolver import MPIClusterResolver as R; R(); print('mpi4py' in sys.modules)"
    )
    assert (code, out.strip()) == (0, "False"), err


def test_without_mpi_and_launcher_it_is_one_rank():
    code, out, err = python(
        "from mpistrat.cluster_resolver import MPIClusterResolver as R; r = R()\n"
        "t = r.topology()\n"
        "print(t.size, t.launcher, r.comm, r.cluster_spec().as_dict(), r.task_id, r.master('worker', 0))"
    )
    assert (code, out.strip()) == (0, "1 local None {'worker': ['localhost']} 0 localhost"), err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1"},
            "2 ranks were started (PMI_SIZE=2, PMI_RANK=1), but Python finds no MPI",
        ),
        (
            {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
            "MPI4PY_LIBMPI=/nowhere/libmpi.so cannot be used",
        ),
    ],
)
def test_without_mpi_several_ranks_are_an_error(variables, message):
    code, _, err = python(
        "from mpistrat.cluster_resolver import MPIClusterResolver as R; R().topology()", **variables
    )
    assert code == 1
    assert message in err
    assert err.count("Traceback") == 1


def test_a_communicator_without_mpi_is_refused():
    code, _, err = python(
        "from mpistrat.cluster_resolver import MPIClusterResolver as R; R(comm=3).comm"
    )
    assert code == 1
    assert "TypeError: comm must be an mpi4py intracommunicator, got 3" in err
