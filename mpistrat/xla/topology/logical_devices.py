"""Checks whether a value can be placed on, or split over, the logical devices of a replica."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence


def check_logical_device(logical_device_id: int, cores_per_replica: int) -> None:
    """Check that a replica has the logical device. Raises: ValueError unless 0 <= id < `cores_per_replica`."""
    if not 0 <= operator.index(logical_device_id) < cores_per_replica:
        raise ValueError(
            f"no logical device {logical_device_id}: a replica has {cores_per_replica}, so ids are 0 to "
            f"{cores_per_replica - 1}; DeviceAssignment.build(computation_shape=…) gives a replica more"
        )


def check_split(
    shape: Sequence[int | None], partition_dimensions: Sequence[int], cores_per_replica: int
) -> list[int]:
    """Check that a value of `shape` splits evenly into one part per logical device (a device of the replica).

    Args:
        shape: the value's lengths; None for a length that is not known yet, so it is not checked.
        partition_dimensions: number of parts of each dimension.
        cores_per_replica: number of logical devices of a replica.
    Returns: `partition_dimensions` as a list of ints.
    Raises: ValueError if there is not one number per dimension, if a number is below 1 or does not divide its
        dimension, or if their product is not `cores_per_replica`.
    """
    parts = [operator.index(count) for count in partition_dimensions]
    if len(parts) != len(shape):
        raise ValueError(
            f"partition_dimensions {parts} has {len(parts)} entries, and the value's shape {list(shape)} has "
            f"{len(shape)}: give one number of parts per dimension"
        )
    for axis, (length, count) in enumerate(zip(shape, parts, strict=True)):
        if count < 1:
            raise ValueError(
                f"partition_dimensions {parts} splits dimension {axis} into {count} parts: give at least 1"
            )
        if length is not None and length % count:
            raise ValueError(
                f"dimension {axis} of the value's shape {list(shape)} does not divide into "
                f"{count} parts (partition_dimensions {parts}): {length % count} of {length} would be left over"
            )
    if math.prod(parts) != cores_per_replica:
        raise ValueError(
            f"partition_dimensions {parts} makes {math.prod(parts)} parts for the {cores_per_replica} logical devices "
            f"of a replica: choose numbers whose product is {cores_per_replica}"
        )
    return parts
