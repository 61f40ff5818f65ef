"""MPISTRAT_CACHE."""

import os

import pytest

from mpistrat.settings import cache_folder


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "/scratch/ann"}, "/scratch/ann/mpistrat"),
        ({"HOME": "/home/ann", "XDG_CACHE_HOME": "relative"}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": "/scratch/costs"}, "/scratch/costs"),
        pytest.param(
            {"HOME": "/home/ann", "MPISTRAT_CACHE": "here"},
            os.path.abspath("here"),
            id="environ4-here",  # not the folder of whoever runs the tests
        ),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": "Off"}, None),
        ({"HOME": "/home/ann", "MPISTRAT_CACHE": ""}, "/home/ann/.cache/mpistrat"),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_folders(environ: dict[str, str], expected: str | None) -> None:
    assert cache_folder(environ) == expected
