"""Who may change what while one rank reads all servers."""

from typing import Any

import pytest

from mpistrat.parameter_server.protocol.snapshot import (
    ADMIT,
    HOLD,
    RELEASE,
    REMEMBERED,
    ChangeLock,
    Push,
    not_yet_everywhere,
)
from support.parameter_servers.recorded_rpc import RecordedRpc, call_now

HOLDER, OTHER, DEAD = 1, 2, 3
SERVERS = (0, 9)


@pytest.fixture
def rpc() -> RecordedRpc:
    return RecordedRpc()


def test_what_a_dead_rank_has_pushed_to_all_is_let_through_everywhere(rpc: Any) -> None:
    """The push came here whole, and another server has made it already."""
    lock, made = ChangeLock(rpc, call_now), []
    rpc.receive_request(HOLDER, HOLD)
    lock.enter(DEAD, Push(5, SERVERS), lambda: made.append("push"))
    rpc.channel.lost.add(DEAD)
    lock.lost(DEAD)
    assert not made
    ticket = rpc.receive_request(HOLDER, ADMIT, {(DEAD, 5, None), (DEAD, 6, None)})
    assert made == ["push"]
    rpc.reply_to(ticket)  # nobody waits for number 6, which never comes


def test_who_gave_up_waiting_does_not_hold_it_later(rpc: Any) -> None:
    lock, made = ChangeLock(rpc, call_now), []
    rpc.receive_request(HOLDER, HOLD)
    rpc.receive_request(OTHER, HOLD)
    rpc.receive_notice(OTHER, RELEASE)
    rpc.receive_notice(HOLDER, RELEASE)
    lock.enter(DEAD, None, lambda: made.append("push"))
    assert made == ["push"]


def test_pushes_of_threads_may_come_in_any_order() -> None:
    fifth, sixth = Push(5, SERVERS), Push(6, SERVERS)
    let = {0: {(OTHER, None): [fifth, sixth]}, 9: {(OTHER, None): [sixth]}}
    assert not_yet_everywhere(let, int) == {0: set(), 9: {(OTHER, 5, None)}}


def test_what_was_let_through_long_ago_is_not_missing() -> None:
    pushes = [Push(number, SERVERS) for number in range(REMEMBERED + 4)]
    let = {0: {(OTHER, None): pushes[:-4]}, 9: {(OTHER, None): pushes[4:]}}
    late = {(OTHER, push.number, None) for push in pushes[-4:]}
    assert not_yet_everywhere(let, int) == {0: late, 9: set()}
