"""Parts of sharded tensors, as files have them: what overlaps, and what is no part of what there is."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from mpistrat.checkpoint.shards import (
    Assembly,
    ShardedArray,
    TensorRegion,
    check_parts,
    check_whole,
)
from mpistrat.checkpoint.state_tree import decode

WHOLE = ShardedArray("weight", (4, 6), "float32")
KNOWN = {"model": {"weight": WHOLE}}


class Model:
    def state_dict(self) -> dict[str, Any]:
        return {}


def part(offset: list[int], values: Any) -> dict[str, Any]:
    return {"model": {"weight": {"offset": offset, "values": values}}}


def test_regions_overlap() -> None:
    ours, theirs = TensorRegion((1, 2), (3, 3)), TensorRegion((0, 4), (2, 5))
    both = ours.overlap(theirs)
    assert both == theirs.overlap(ours) == TensorRegion((1, 4), (1, 1))
    assert both.within(ours) == (slice(0, 1), slice(2, 3))
    assert both.within(theirs) == (slice(1, 2), slice(0, 1))
    assert ours.overlap(TensorRegion((4, 0), (1, 9))).size == 0
    assert TensorRegion((), ()).overlap(TensorRegion((), ())).size == 1  # scalars


@pytest.mark.parametrize(
    "parts",
    [
        [],
        {"model": [1]},
        {"model": {"weight": {"offset": [0, 0]}}},
        part([0, -1], torch.ones(1, 1)),
        part([0, 0], np.ones((1, 1), np.float32)),
        part([0], torch.ones(1, 1)),
        part([0, 0], torch.ones(1)),
        part([3, 0], torch.ones(2, 6)),
        part([0, 0], torch.ones(1, 1, dtype=torch.float64)),
        {"model": {"other": part([0, 0], torch.ones(1, 1))["model"]["weight"]}},
    ],
)
def test_what_is_no_part(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"it|no part of"):
        check_parts(parts, KNOWN)


def test_parts_of_objects_that_the_program_has_not_may_be_any() -> None:
    check_parts({"other": part([9], torch.ones(1))["model"]}, KNOWN)
    check_parts(part([2, 3], torch.ones(2, 3)), KNOWN)


@pytest.mark.parametrize(
    "tree",
    [
        {"sharded": 3, "shape": [1], "dtype": "float32"},
        {"sharded": "a", "shape": [-1], "dtype": "float32"},
        {"sharded": "a", "shape": [1], "dtype": "no_such"},
        {"sharded": "a", "shape": [1]},
        {"sharded": "a", "shape": [1], "dtype": "float32", "of": "dict"},
    ],
)
def test_what_is_no_sharded_tensor(tree: Any) -> None:
    with pytest.raises(ValueError, match=r"sharded|dtype|unknown"):
        decode(tree, {})


def test_a_whole_is_put_together_from_what_overlaps_and_counted_once() -> None:
    whole = torch.arange(24.0).view(4, 6)
    files = [
        part([0, 0], whole[:2, :4]),
        part([0, 0], whole[:2, :4]),  # a copy
        part([0, 4], whole[:2, 4:]),
        part([2, 0], whole[2:]),
    ]
    read = []

    def parts(rank: int) -> Any:
        read.append(rank)
        return files[rank]

    states = {"model": {"layers": [{"weight": WHOLE}], "steps": 3}}
    found = Assembly({"model": Model()}, 0, 1).assembled(states, parts, len(files))
    assert torch.equal(found["model"]["layers"][0]["weight"], whole)
    assert found["model"]["steps"] == 3
    assert sorted(read) == [0, 1, 2, 3]


def test_a_whole_with_a_hole_is_an_error() -> None:
    files = [part([0, 0], torch.ones(2, 6)), {}, part([2, 0], torch.ones(2, 5))]
    with pytest.raises(ValueError, match="no rank has saved all of model's weight"):
        Assembly({"model": Model()}, 0, 1).assembled(
            {"model": {"weight": WHOLE}}, files.__getitem__, len(files)
        )


def test_what_is_sharded_is_not_kept_in_memory() -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    finally:
        dist.destroy_process_group()
    check_whole({"model": {"a": torch.ones(4)}})
    with pytest.raises(ValueError, match=r"^run_elastic: a\.b of model is sharded"):
        check_whole({"model": {"a": {"b": tensor}}})
