"""MPISTRAT_SHARED_MB."""

import math

import pytest

from mpistrat.errors import TopologyError
from mpistrat.settings import shared_bytes


def test_megabytes() -> None:
    assert shared_bytes({}) == math.inf
    assert shared_bytes({"MPISTRAT_SHARED_MB": "2.5"}) == 2.5e6
    assert shared_bytes({"MPISTRAT_SHARED_MB": "0"}) == 0


@pytest.mark.parametrize("text", ["much", "-1", "", "nan"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(TopologyError, match="expected megabytes of shared memory"):
        shared_bytes({"MPISTRAT_SHARED_MB": text})
