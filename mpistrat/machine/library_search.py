"""The places where mpi4py and the dynamic linker look for libraries, in their order."""

from __future__ import annotations

import contextlib
import glob
import os
import site
import sys
from collections.abc import Iterator

from mpistrat.settings import Environment

PRELOAD = "LD_PRELOAD"  # "/opt/mpi/lib/libmpi.so.12"; separated by colons or spaces
CHOSEN = "MPI4PY_LIBMPI"  # "/opt/mpi/lib/libmpi.so.12", a folder, or a list of files and folders
LIBRARY_PATH = "LD_LIBRARY_PATH"  # "/opt/mpi/lib:/opt/cuda/lib64"
# Rules that are no environment variables
ENVIRONMENT = "environment"
USER = "user"
BASE = "base"

_NAMES = "libmpi.so*"
_ELF = b"\x7fELF"


def visible_mpi_libraries(environ: Environment = os.environ) -> list[tuple[str, str]]:
    """Return every libmpi that mpi4py or the dynamic linker can find, as pairs (rule, path), the first choice first.

    The order is mpi4py 4.1's (mpi4py/_mpiabi.py): LD_PRELOAD; MPI4PY_LIBMPI, and if that is set, mpi4py looks nowhere
    else; the `lib` of the virtual environment, of the user's packages and of Python itself; LD_LIBRARY_PATH. The
    linker's own folders in the system are not listed. `rule` is the name of a variable, or ENVIRONMENT, USER or BASE.
    An empty list if none is found.
    """
    preloaded = environ.get(PRELOAD, "").replace(":", " ").split()
    found = [(PRELOAD, path) for path in preloaded if os.path.basename(path).startswith("libmpi")]
    for entry in _entries(environ, CHOSEN):
        entry = os.path.expanduser(os.path.expandvars(entry))
        paths = _in_folder(entry) if os.path.isdir(entry) else [entry]
        found += [(CHOSEN, path) for path in paths]
    for rule, prefix in _prefixes():
        folder = os.path.join(prefix, "lib")
        found += [(rule, path) for path in _in_folder(folder)]
    return found + [(LIBRARY_PATH, path) for path in libraries_on_path(_NAMES, environ)]


def libraries_on_path(pattern: str, environ: Environment = os.environ) -> list[str]:
    """Return the paths of the libraries in LD_LIBRARY_PATH's folders with a name that matches `pattern`: "libnccl.so*".

    They are in the order of the folders; an empty list if there are none.
    """
    folders = _entries(environ, LIBRARY_PATH)
    return [path for folder in folders for path in _in_folder(folder, pattern)]


def _entries(environ: Environment, name: str) -> list[str]:
    entries = environ.get(name, "").split(os.pathsep)
    return [entry for entry in entries if entry]


def _prefixes() -> Iterator[tuple[str, str]]:
    if sys.exec_prefix != sys.base_exec_prefix:
        yield ENVIRONMENT, sys.exec_prefix
    if site.ENABLE_USER_SITE and site.USER_BASE:
        yield USER, os.path.abspath(site.USER_BASE)
    if sys.base_exec_prefix != "/usr":  # the dynamic linker searches /usr/lib anyway
        yield BASE, sys.base_exec_prefix


def _in_folder(folder: str, pattern: str = _NAMES) -> list[str]:
    """Return the ELF files in `folder` that match `pattern`, sorted; of several links to a file, the first.

    Other files are left out: the `libmpi.so` of the PyPI wheels is a text for the linker.
    """
    paths: dict[str, str] = {}
    wanted = os.path.join(glob.escape(folder), pattern)
    for path in sorted(glob.glob(wanted)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            if file.read(len(_ELF)) == _ELF:
                paths.setdefault(os.path.realpath(path), path)
    return list(paths.values())
