"""Whether torch_xla and torch fit is asked of their metadata: importing it beside another torch ends the process."""

import importlib.metadata
import re

import pytest

from mpistrat.xla.runtime import check_versions


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("torch", ["2.9.0", "2.9.1+cpu"])
def test_patch_releases_of_torch_fit(monkeypatch: pytest.MonkeyPatch, torch: str) -> None:
    installed(monkeypatch, torch_xla="2.9.0", torch=torch)
    check_versions()


@pytest.mark.parametrize("torch", ["2.13.0", "2.10.0+cpu", "3.9.0"])
def test_another_torch_is_an_error_that_names_both(
    monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    installed(monkeypatch, torch_xla="2.9.0", torch=torch)
    message = f"torch_xla 2.9.0 is built against torch 2.9, and this is torch {torch}: pip install 'torch==2.9.*'"
    with pytest.raises(ImportError, match=re.escape(message)):
        check_versions()


@pytest.mark.parametrize("missing", ["torch_xla", "torch"])
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    versions = {"torch_xla": "2.9.0", "torch": "2.9.0"}
    del versions[missing]
    installed(monkeypatch, **versions)
    with pytest.raises(ImportError, match=rf"needs {missing}, .*'torch_xla\[tpu\]"):
        check_versions()
