"""A group that fails on one rank fails on all."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators.transports.accelerator.joint_group import JointGroup


def test_the_other_ranks_hear_of_an_error_before_their_group_loses_this_one() -> None:
    done: list[str] = []
    channel: Any = SimpleNamespace(send=lambda text: done.append(f"told: {text}"), received=None)
    host: Any = SimpleNamespace(rank=1)
    watch: Any = SimpleNamespace(revocable_group=None)
    joint: JointGroup[Any] = JointGroup("NCCL", host, channel, watch, done.append)
    joint.group = "aborted"
    with pytest.raises(RuntimeError, match="NCCL was aborted on all ranks: rank 1"), joint:
        raise ValueError("no")
    assert done == ["told: rank 1: ValueError: no", "aborted"]
    with (
        pytest.raises(RuntimeError, match="NCCL cannot be used any more: rank 1: ValueError"),
        joint,
    ):
        pass
