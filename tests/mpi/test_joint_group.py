"""A group that fails on one rank fails on all."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mpistrat.communicators.transports.accelerator import collective_group, pending_calls
from mpistrat.communicators.transports.accelerator.collective_group import CollectiveGroup
from mpistrat.communicators.transports.accelerator.pending_calls import PendingCalls


def test_the_other_ranks_hear_of_an_error_before_their_group_loses_this_one() -> None:
    done: list[str] = []
    channel: Any = SimpleNamespace(tell=lambda text: done.append(f"told: {text}"), received=None)
    host: Any = SimpleNamespace(rank=1)
    watch: Any = SimpleNamespace(revocable_group=None)
    joint: CollectiveGroup[Any] = CollectiveGroup("NCCL", host, channel, watch, done.append)
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

    monkeypatch.setattr(collective_group, "wait_until", interrupt)
    joint: CollectiveGroup[Any] = CollectiveGroup("NCCL", host, channel, watch, abort)
    with pytest.raises(KeyboardInterrupt):
        joint.start(make, lambda: "")
    assert done == ["told: rank 1: KeyboardInterrupt: "]
    goes_on.set()
    assert is_over.wait(5)
    assert done[1:] == ["aborted"]
    assert joint.group is None


def test_a_group_without_calls_leaves_what_others_say_to_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event_watcher's answer would stay in the channel: no rank counts on it when a start has failed."""
    heard: list[str] = []
    joint: Any = SimpleNamespace(hear=lambda: heard.append("failure"), group="made")
    record = SimpleNamespace(words=[0] * 8)
    watch: Any = SimpleNamespace(record=record, slot=0)
    contract: Any = SimpleNamespace(name="numbers", calls=1, recorded=(b"all_reduce", 4))
    library: Any = SimpleNamespace(
        current_stream=lambda: None, record=lambda stream: "event", is_done=lambda event: True
    )
    event_watcher = SimpleNamespace(watched=set(), is_awake=threading.Event())
    monkeypatch.setattr(pending_calls, "event_watcher", lambda: event_watcher)
    calls = PendingCalls(contract, watch, library, joint, listens=True)
    assert not calls.look()
    assert heard == []
    calls.add()
    assert not calls.look()
    assert heard == ["failure"]
