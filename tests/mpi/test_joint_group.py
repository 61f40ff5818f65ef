"""A group that fails on one rank fails on all."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators.transports.accelerator import joint_group
from mpistrat.communicators.transports.accelerator.joint_group import JointGroup


def test_the_other_ranks_hear_of_an_error_before_their_group_loses_this_one() -> None:
    done: list[str] = []
    channel: Any = SimpleNamespace(tell=lambda text: done.append(f"told: {text}"), received=None)
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


def test_a_start_that_is_interrupted_is_told_and_aborts_what_comes_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    channel: Any = SimpleNamespace(tell=lambda text: done.append(f"told: {text}"))
    watch: Any = SimpleNamespace(revocable_group=None)
    host: Any = SimpleNamespace(rank=1)
    goes_on, is_over = threading.Event(), threading.Event()

    def abort(group: str) -> None:
        done.append(group)
        is_over.set()

    def make() -> str:
        goes_on.wait(5)
        return "aborted"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(joint_group, "wait_until", interrupt)
    joint: JointGroup[Any] = JointGroup("NCCL", host, channel, watch, abort)
    with pytest.raises(KeyboardInterrupt):
        joint.start(make, lambda: "")
    assert done == ["told: rank 1: KeyboardInterrupt: "]
    goes_on.set()
    assert is_over.wait(5)
    assert done[1:] == ["aborted"]
    assert joint.group is None
