"""What mpi4py and the dynamic linker would find."""

from pathlib import Path

import pytest

from mpistrat.machine import library_search
from mpistrat.machine.library_search import libraries_on_path, visible_mpi_libraries


def library(folder: Path, name: str, content: bytes = b"\x7fELF...") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of mpi4py: preloaded, chosen, environment, LD_LIBRARY_PATH."""
    monkeypatch.setattr(library_search.sys, "exec_prefix", str(tmp_path / "env"))
    monkeypatch.setattr(library_search.sys, "base_exec_prefix", "/usr")
    monkeypatch.setattr(library_search.site, "ENABLE_USER_SITE", False)
    preloaded = "/pre/libmpi.so.12"  # a path with a space cannot be preloaded
    of_wheel = library(tmp_path / "env" / "lib", "libmpi.so.40")
    of_module = library(tmp_path / "module", "libmpi.so.12")
    environ = {
        "LD_PRELOAD": f"/usr/lib/libjemalloc.so.2 {preloaded}",
        "MPI4PY_LIBMPI": "/chosen/libmpi.so.12",
        "LD_LIBRARY_PATH": f"{tmp_path / 'module'}::/nowhere",
    }
    assert visible_mpi_libraries(environ) == [
        ("LD_PRELOAD", preloaded),
        ("MPI4PY_LIBMPI", "/chosen/libmpi.so.12"),
        ("environment", of_wheel),
        ("LD_LIBRARY_PATH", of_module),
    ]
    assert visible_mpi_libraries({}) == [("environment", of_wheel)]


def test_a_linkers_script_is_no_library(tmp_path: Path) -> None:
    """As the wheels' `libmpi.so`; nor is a second name another library."""
    library(tmp_path, "libmpi.so", b"INPUT(libmpi.so.12)\n")
    real = library(tmp_path, "libmpi.so.12.4")
    (tmp_path / "libmpi.so.12").symlink_to(real)
    found = libraries_on_path("libmpi.so*", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert found == [str(tmp_path / "libmpi.so.12")]


def test_a_folder_may_be_chosen(tmp_path: Path) -> None:
    path = library(tmp_path, "libmpi.so.40")
    assert ("MPI4PY_LIBMPI", path) in visible_mpi_libraries({"MPI4PY_LIBMPI": str(tmp_path)})
