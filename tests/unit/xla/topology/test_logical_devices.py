"""What may be placed on, or split over, the logical devices of a replica."""

import pytest

from mpistrat.xla.topology.logical_devices import check_logical_device, check_split


def test_what_fits():
    check_logical_device(1, 2)
    check_split([4, None, 6], [2, 2, 1], 4)
    check_split([], [], 1)


@pytest.mark.parametrize("number", [-1, 2])
def test_no_such_device(number):
    with pytest.raises(ValueError, match=f"no logical device {number}: a replica has 2, .* 0 to 1"):
        check_logical_device(number, 2)


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ([1], r"\[1\] has 1 entries, and the value's shape \[4, 2\] has 2"),
        ([3, 1], r"dimension 0 .* does not divide into 3 parts .*: 1 of 4 would be left over"),
        ([0, 1], "dimension 0 into 0 parts: give at least 1"),
        ([-2, -1], "dimension 0 into -2 parts"),
        ([4, 1], r"makes 4 parts for the 2 logical devices .* whose product is 2"),
    ],
)
def test_what_does_not_split(partition, message):
    with pytest.raises(ValueError, match=message):
        check_split([4, 2], partition, 2)
