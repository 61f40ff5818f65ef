"""Stale synchronous parallel: who may begin a step, and who holds whom back."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from mpistrat.parameter_server.staleness import MAY_BEGIN, STEPS, Clock, WorkerClock
from support.parameter_servers.noted_post import NotedPost


def clock_of(workers):
    post = NotedPost()
    told = []
    return post, Clock(post, workers, told.append), told


def waits(post, ticket) -> bool:
    return ticket not in dict(post.answers)


def test_a_step_begins_when_the_slowest_has_come_so_far() -> None:
    post, clock, _ = clock_of([1, 2, 3])
    first = post.asked(1, MAY_BEGIN, 0)
    assert post.answer_to(first) == 0
    clock.ended(1, 1)
    second = post.asked(1, MAY_BEGIN, 1)
    clock.ended(2, 1)
    assert waits(post, second)
    clock.ended(3, 1)
    assert post.answer_to(second) == 1


def test_several_wait_for_one_and_are_let_go_together() -> None:
    post, clock, _ = clock_of([1, 2, 3])
    for rank in (1, 2):
        clock.ended(rank, 2)
    tickets = [post.asked(1, MAY_BEGIN, 1), post.asked(2, MAY_BEGIN, 2)]
    assert all(waits(post, ticket) for ticket in tickets)
    clock.ended(3, 1)
    assert [waits(post, ticket) for ticket in tickets] == [False, True]
    clock.ended(3, 2)
    assert post.answer_to(tickets[1]) == 2


def test_who_leaves_holds_nobody_back() -> None:
    post, clock, told = clock_of([1, 2])
    clock.ended(1, 5)
    ticket = post.asked(1, MAY_BEGIN, 5)
    assert waits(post, ticket)
    clock.leave(2)
    assert post.answer_to(ticket) >= 5
    assert told[-1] == 5
    assert post.answer_to(post.asked(2, STEPS)) == {1: 5, 2: 0}
    clock.leave(1)
    assert told[-1] > 1 << 60  # nobody waits for anything


def test_rounds_are_told_before_anybody_may_begin() -> None:
    post = NotedPost()
    seen = []
    clock = Clock(post, [1, 2], lambda steps: seen.append((steps, len(post.answers))))
    clock.ended(1, 1)
    post.asked(1, MAY_BEGIN, 1)
    clock.ended(2, 1)
    assert [count for steps, count in seen if steps == 1] == [0]
    assert len(post.answers) == 1


class _Client:
    """Of a worker, whose requests go to the clocks of servers in this process."""

    def __init__(self, rank, servers):
        self.servers, self.post, self._rank = list(range(len(servers))), self, rank
        self._posts, self._clocks = zip(*servers, strict=True)
        self.asked = 0
        self.routes = SimpleNamespace(copies_of=lambda server: (server,))

    def next_push(self, servers):
        return None

    def tell(self, server, kind, body):
        self._clocks[server].ended(self._rank, body[0])

    def ask(self, server, kind, body=None):
        self.asked += 1
        post = self._posts[server]
        ticket = post.asked(self._rank, kind, body)

        class Reply:
            def wait(self):
                return post.answer_to(ticket)  # KeyError where it would wait

        return Reply()


@pytest.mark.parametrize(("k", "num_servers"), [*itertools.product([0, 1, 3, None], [1, 3])])
def test_no_order_of_steps_exceeds_the_bound(k, num_servers) -> None:
    servers = [clock_of([0, 1, 2])[:2] for _ in range(num_servers)]
    clients = [_Client(rank, servers) for rank in range(3)]
    clocks = [WorkerClock(client, k) for client in clients]
    rng = np.random.default_rng(num_servers)
    most = 0
    for _ in range(600):
        rank = int(rng.choice(3, p=[0.6, 0.3, 0.1]))
        try:
            clocks[rank].begin()
        except KeyError:  # it would wait
            assert clocks[rank].steps - min(one.steps for one in clocks) == k + 1
            continue
        steps = [clock.steps for clock in clocks]
        most = max(most, steps[rank] - min(steps))
        clocks[rank].end()
    assert most == k if k is not None else most > 20
    assert clocks[0].combines == (k == 0)
    if k is None:
        assert not any(client.asked for client in clients)  # nothing is waited for
    assert clocks[0].all_steps() == {rank: clock.steps for rank, clock in enumerate(clocks)}


def test_a_step_that_sent_something_to_combine_ends_when_all_have_ended_it() -> None:
    servers = [clock_of([0, 1])[:2] for _ in range(2)]
    one, other = (_Client(rank, servers) for rank in range(2))
    clock = WorkerClock(one, 0)
    clock.end()  # nothing was sent
    WorkerClock(other, 0).end()
    clock.begin()
    assert clock.round_to_send_in() == 1
    with pytest.raises(KeyError):  # it would wait
        clock.end()
    assert WorkerClock(one, 1).round_to_send_in() is None
