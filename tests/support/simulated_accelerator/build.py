"""Compiles the simulated accelerator for the torch that is installed, once; later processes load what is cached."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent


class NoCompiler(RuntimeError):
    """There is no g++ on PATH."""


def library(folder: Path | None = None) -> Path:
    """The compiled library, made now if this torch and these sources have none yet.

    Several processes may ask at once: one compiles, the others wait for it.
    Args: folder: where libraries are cached; by default in the user's cache folder.
    Raises: NoCompiler; RuntimeError with the compiler's output.
    """
    folder = folder or _cache_folder()
    made = folder / f"torch-{torch.__version__}-{_digest()}.so"
    if made.exists():
        return made
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler("the simulated accelerator needs g++")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(compiler, made)
    return made


def _compile(compiler: str, made: Path) -> None:
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        unfinished = Path(folder, "library.so")
        command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-pthread"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        command += [str(SOURCES / "library.cpp"), "-o", str(unfinished)]
        command += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ could not compile the simulated accelerator:\n{done.stderr}")
        unfinished.replace(made)


def _digest() -> str:
    sources = [*sorted(SOURCES.glob("*.cpp")), *sorted(SOURCES.glob("*.h")), Path(__file__)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _cache_folder() -> Path:
    name = "mpistrat-simulated-accelerator"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (caches / name, Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "lock").touch()
        except OSError:
            continue
        return folder
    raise RuntimeError(
        f"no folder to cache the simulated accelerator in: {caches} and the temporary one refuse"
    )
