"""Job folders of a test's own."""

import os
from pathlib import Path

import pytest

from mpistrat.liveness.records import job_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Job folders are made in a folder of the test's own."""
    monkeypatch.setattr(job_folder, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"mpistrat-{os.getuid()}"
