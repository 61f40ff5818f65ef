"""Stale synchronous parallel: who may begin a step, and who holds whom back."""

import itertools

import numpy as np
import pytest

from mpistrat.parameter_server.protocol.messages import MAY_BEGIN, STEPS
from mpistrat.parameter_server.protocol.staleness import ServerClock, WorkerClock
from support.parameter_servers.recorded_rpc import RecordedRpc, call_now


def clock_of(workers):
    rpc = RecordedRpc()
    announced = []
    return rpc, ServerClock(rpc, workers, announced.append, call_now), announced


def waits(rpc, ticket) -> bool:
    return ticket not in dict(rpc.replies)


def test_a_step_begins_when_the_slowest_has_come_so_far() -> None:
    rpc, clock, _ = clock_of([1, 2, 3])
    first = rpc.receive_request(1, MAY_BEGIN, 0)
    assert rpc.reply_to(first) == 0
    clock.ended(1, 1)
    second = rpc.receive_request(1, MAY_BEGIN, 1)
    clock.ended(2, 1)
    assert waits(rpc, second)
    clock.ended(3, 1)
    assert rpc.reply_to(second) == 1


def test_several_wait_for_one_and_are_let_go_together() -> None:
    rpc, clock, _ = clock_of([1, 2, 3])
    for rank in (1, 2):
        clock.ended(rank, 2)
    tickets = [rpc.receive_request(1, MAY_BEGIN, 1), rpc.receive_request(2, MAY_BEGIN, 2)]
    assert all(waits(rpc, ticket) for ticket in tickets)
    clock.ended(3, 1)
    assert [waits(rpc, ticket) for ticket in tickets] == [False, True]
    clock.ended(3, 2)
    assert rpc.reply_to(tickets[1]) == 2


def test_who_leaves_holds_nobody_back() -> None:
    rpc, clock, announced = clock_of([1, 2])
    clock.ended(1, 5)
    ticket = rpc.receive_request(1, MAY_BEGIN, 5)
    assert waits(rpc, ticket)
    clock.leave(2)
    assert rpc.reply_to(ticket) >= 5
    assert announced[-1] == 5
    assert rpc.reply_to(rpc.receive_request(2, STEPS)) == {1: 5, 2: 0}
    clock.leave(1)
    assert announced[-1] > 1 << 60  # nobody waits for anything


def test_rounds_are_told_before_anybody_may_begin() -> None:
    rpc = RecordedRpc()
    seen = []
    clock = ServerClock(rpc, [1, 2], lambda steps: seen.append((steps, len(rpc.replies))), call_now)
    clock.ended(1, 1)
    rpc.receive_request(1, MAY_BEGIN, 1)
    clock.ended(2, 1)
    assert [count for steps, count in seen if steps == 1] == [0]
    assert len(rpc.replies) == 1


class _Routes:
    """Of a worker, whose requests go to the clocks of servers in this process."""

    def __init__(self, rank, servers):
        self.servers, self.rpc, self._rank = list(range(len(servers))), self, rank
        self._rpcs, self._clocks = zip(*servers, strict=True)
        self.called = 0

    def name_of(self, rank):
        return f"worker {rank}"

    def copies_of(self, server):
        return (server,)

    def next_push(self, servers):
        return None

    def notify(self, server, kind, body):
        self._clocks[server].ended(self._rank, body[0])

    def notify_all(self, servers, kind, body):
        for server in servers:
            self.notify(server, kind, body)

    def call(self, server, kind, body=None):
        self.called += 1
        rpc = self._rpcs[server]
        ticket = rpc.receive_request(self._rank, kind, body)

        class PendingReply:
            def wait(self):
                return rpc.reply_to(ticket)  # KeyError where it would wait

        return PendingReply()


@pytest.mark.parametrize(("k", "num_servers"), [*itertools.product([0, 1, 3, None], [1, 3])])
def test_no_order_of_steps_exceeds_the_bound(k, num_servers) -> None:
    servers = [clock_of([0, 1, 2])[:2] for _ in range(num_servers)]
    clients = [_Routes(rank, servers) for rank in range(3)]
    clocks = [WorkerClock(client, k) for client in clients]
    rng = np.random.default_rng(num_servers)
    most = 0
    for _ in range(600):
        rank = int(rng.choice(3, p=[0.6, 0.3, 0.1]))
        try:
            clocks[rank].begin()
        except KeyError:  # it would wait
            assert clocks[rank].steps - min(other.steps for other in clocks) == k + 1
            continue
        steps = [clock.steps for clock in clocks]
        most = max(most, steps[rank] - min(steps))
        clocks[rank].end()
    assert most == k if k is not None else most > 20
    assert clocks[0].combines == (k == 0)
    if k is None:
        assert not any(client.called for client in clients)  # nothing is waited for
    assert clocks[0].all_steps() == {f"worker {i}": clock.steps for i, clock in enumerate(clocks)}


def test_a_step_that_sent_something_to_combine_ends_when_all_have_ended_it() -> None:
    servers = [clock_of([0, 1])[:2] for _ in range(2)]
    first, second = (_Routes(rank, servers) for rank in range(2))
    clock = WorkerClock(first, 0)
    clock.end()  # nothing was sent
    WorkerClock(second, 0).end()
    clock.begin()
    assert clock.round_to_send_in() == 1
    with pytest.raises(KeyError):  # it would wait
        clock.end()
    assert WorkerClock(first, 1).round_to_send_in() is None
