"""The parts that an earlier version has written make the timeline that it made of them."""

import shutil
from pathlib import Path

from mpistrat.trace import merging
from support.recorded_training import FOLDER


def test_parts_of_an_earlier_version_are_merged_as_it_did(tmp_path: Path) -> None:
    for part in (FOLDER / "trace").glob("*.part"):
        shutil.copy(part, tmp_path)
    merged = merging.merge(str(tmp_path))
    assert merged.is_complete
    assert (tmp_path / "trace.json").read_text() == (FOLDER / "trace" / "trace.json").read_text()
