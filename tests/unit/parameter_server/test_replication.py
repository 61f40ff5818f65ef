"""A server answers for what its replica has, too; and what comes to both comes to the same."""

import re

import cloudpickle
import numpy as np
import pytest
import torch

from mpistrat import errors
from mpistrat.parameter_server.protocol import messages
from mpistrat.parameter_server.protocol.idempotency import session_of
from mpistrat.parameter_server.protocol.messages import (
    ENDED,
    FAILED,
    MAY_BEGIN,
    GradientMethod,
    NewArray,
    Push,
    TensorSpec,
    Update,
    Updates,
    inline,
    unpack,
)
from mpistrat.parameter_server.protocol.snapshot import ADMIT, HOLD
from mpistrat.parameter_server.rpc.segments import Mappings
from mpistrat.parameter_server.server.replication import ABANDON, CHANGED
from mpistrat.parameter_server.server.server import ParameterServer
from mpistrat.parameter_server.server.server_optimizers import OptimizerDefinition
from support.parameter_servers.recorded_rpc import RecordedRpc

KEY, PRIMARY, BACKUP, CLIENT, OTHER = 3, 8, 9, 1, 2
OPTIMIZER = 5


class Pair:
    """Two servers; what the first passes on comes to the second when the test says so."""

    def __init__(self) -> None:
        self.first, self.second = RecordedRpc(), RecordedRpc()
        self.first.rank, self.second.rank = PRIMARY, BACKUP
        clients = [CLIENT, OTHER]
        self.primary = ParameterServer(self.first, clients, clients, CLIENT, BACKUP)
        self.backup = ParameterServer(self.second, clients, clients, CLIENT)
        self.why_not_there = ""

    def carry(self, most: int = 100) -> None:
        """Changes to the backup, and its answers back."""
        notices, self.first.notices = self.first.notices, []
        for to, kind, body in notices[:most]:
            assert to == BACKUP
            self.second.receive_notice(PRIMARY, kind, body)
        self.first.notices = notices[most:]
        answers, self.second.notices = self.second.notices, []
        for to, kind, (number, why_not) in answers:
            assert (to, kind) == (PRIMARY, CHANGED)
            self.first.receive_notice(BACKUP, CHANGED, (number, why_not or self.why_not_there))

    def values(self) -> list[list[float]]:
        """On the first server; then on the second, where nobody else looks while the first lives."""
        stores = self.primary.store, self.backup.backup_copies.copies
        if KEY in self.backup.store.by_key:
            stores = self.primary.store, self.backup.store
        return [store.table(KEY).array.tolist() for store in stores]


def created() -> NewArray:
    value = np.zeros(3)
    return NewArray(KEY, PRIMARY, "v", TensorSpec.of(value), inline(value))


def add(number: float, n: int, size: int = 3, key: int = KEY) -> Update:
    return Update(key, "assign_add", [inline(np.full(size, number))], session_of(CLIENT), n)


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.first.receive_request(CLIENT, messages.CREATE, created())
    pair.carry()
    return pair


def is_answered(rpc: RecordedRpc, ticket: int) -> bool:
    return ticket in dict(rpc.replies)


def test_an_array_is_found_when_both_have_it() -> None:
    pair = Pair()
    tickets = [pair.first.receive_request(CLIENT, "find", KEY)]
    tickets.append(pair.first.receive_request(CLIENT, messages.CREATE, created()))
    tickets.append(pair.first.receive_request(CLIENT, "find", KEY))
    assert not any(is_answered(pair.first, ticket) for ticket in tickets)
    pair.carry()
    assert [pair.first.reply_to(ticket)[0] for ticket in tickets] == ["v"] * 3
    assert pair.backup.backup_copies.names == {KEY: "v"}


def test_updates_are_answered_for_in_turn_when_both_have_them(pair) -> None:
    tickets = [
        pair.first.receive_request(CLIENT, "update", Updates([add(number, number)]))
        for number in (1, 10)
    ]
    assert pair.values() == [[11] * 3, [0] * 3]
    pair.carry(1)
    assert [is_answered(pair.first, ticket) for ticket in tickets] == [True, False]
    pair.carry()
    assert pair.values() == [[11] * 3] * 2
    (first,), (second,) = map(pair.first.reply_to, tickets)
    assert (unpack(first, Mappings())[0], unpack(second, Mappings())[0]) == (1, 11)


def test_what_was_not_answered_for_is_made_once_by_who_goes_on(pair) -> None:
    """One of two updates came to the backup; both are asked again, of it."""
    for number in (1, 10):
        pair.first.receive_request(CLIENT, "update", Updates([add(number, number)]))
    pair.carry(1)
    pair.second.lose(PRIMARY)
    for number in (1, 10):
        pair.second.reply_to(
            pair.second.receive_request(CLIENT, "update", Updates([add(number, number)]))
        )
    pair.second.receive_request(CLIENT, messages.CREATE, created())  # as if its answer had not come
    assert pair.values()[1] == [11] * 3
    assert not pair.second.notices


def test_without_its_replica_a_server_answers_alone(pair) -> None:
    ticket = pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)]))
    assert not is_answered(pair.first, ticket)
    pair.first.lose(BACKUP)
    pair.first.reply_to(ticket)
    pair.first.notices.clear()
    pair.first.reply_to(pair.first.receive_request(CLIENT, "update", Updates([add(1, 2)])))
    assert not pair.first.notices


def test_an_update_that_fails_fails_on_both_and_those_beside_it_are_made(pair, capsys) -> None:
    asked = Updates([add(1, 1), add(5, 2, size=4), add(10, 3)])
    ticket = pair.first.receive_request(CLIENT, "update", asked)
    pair.carry()
    with pytest.raises(ValueError, match="broadcast"):
        pair.first.reply_to(ticket)
    assert pair.values() == [[11] * 3] * 2
    assert capsys.readouterr().err == ""


def test_a_replica_that_could_not_do_the_same_is_given_up(pair, capsys) -> None:
    pair.why_not_there = "MemoryError: no room"
    ticket = pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)]))
    pair.carry()
    pair.first.reply_to(ticket)
    assert re.search("no replica any more of 'v'.*: MemoryError: no room", capsys.readouterr().err)
    assert [(to, kind) for to, kind, _ in pair.first.notices] == [(BACKUP, ABANDON)]
    pair.second.receive_notice(PRIMARY, ABANDON)
    pair.second.lose(PRIMARY)
    for kind, body in (
        ("find", KEY),
        ("pull", (KEY, None)),
        ("rows", (KEY, inline(np.array([0])))),
        ("update", Updates([add(1, 1)])),
        ("create", created()),
        ("optimizer state", (0, KEY)),
    ):
        with pytest.raises(errors.UnavailableError, match="'v' is lost"):
            pair.second.reply_to(pair.second.receive_request(CLIENT, kind, body))


def test_answers_are_remembered_as_long_as_they_may_be_asked_again(pair) -> None:
    for number in range(5):
        pair.first.receive_request(
            CLIENT, "update", Updates([add(1, number)], settled=max(0, number - 1))
        )
    pair.carry()
    assert len(pair.primary.store.idempotency) == len(pair.backup.store.idempotency) == 2


def test_who_holds_all_servers_reads_what_outlives_one(pair) -> None:
    """Else what it reads may be gone with the server, and what came to others not."""
    push = Push(5, (PRIMARY, BACKUP), PRIMARY)
    pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)], push))
    hold = pair.first.receive_request(7, HOLD)
    assert pair.first.reply_to(hold) == {(CLIENT, PRIMARY): [push]}
    admit = pair.first.receive_request(7, ADMIT, set())
    assert not is_answered(pair.first, admit)
    pair.carry()
    assert pair.first.reply_to(admit) is None
    there = pair.second.receive_request(7, HOLD)
    assert pair.second.reply_to(there) == {(CLIENT, PRIMARY): [push]}  # known to who goes on


def test_a_change_for_a_replica_is_made_though_one_rank_holds_the_server(pair) -> None:
    pair.second.receive_request(7, HOLD)
    ticket = pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)]))
    pair.carry()
    pair.first.reply_to(ticket)
    assert pair.values() == [[1] * 3] * 2


def test_what_a_dead_server_may_still_have_sent_is_not_made_again(pair) -> None:
    """Another's question comes before what the server had sent, and tells that it has died."""
    asked = Updates([add(1, 1)])
    pair.first.receive_request(CLIENT, "update", asked)
    pair.second.reply_to(pair.second.receive_request(CLIENT, "update", asked))
    pair.second.reply_to(
        pair.second.receive_request(CLIENT, "update", Updates([add(10, 2)], settled=2))
    )
    pair.carry()
    pair.second.lose(PRIMARY)
    assert pair.values()[1] == [11] * 3


def test_what_could_not_be_sent_holds_up_nothing_else(pair) -> None:
    tell = pair.first.notify

    def fail(*_: object) -> None:
        pair.first.notify = tell
        raise MemoryError("no room for the message")

    pair.first.notify = fail
    with pytest.raises(RuntimeError, match="no room for the message"):
        pair.first.reply_to(pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)])))
    ticket = pair.first.receive_request(CLIENT, "update", Updates([add(10, 2)]))
    pair.carry()
    pair.first.reply_to(ticket)
    assert pair.values() == [[10] * 3] * 2


@pytest.fixture
def stepped(pair) -> Pair:
    """With an optimizer whose rounds are the sums of all workers' gradients."""
    definition = cloudpickle.dumps(OptimizerDefinition(torch.optim.SGD, {"lr": 1.0}))
    ticket = pair.first.receive_request(
        CLIENT, "make optimizer", (OPTIMIZER, definition, [(KEY, False)])
    )
    assert not is_answered(pair.first, ticket)
    pair.carry()
    assert pair.first.reply_to(ticket) is None
    return pair


def test_loaded_state_is_answered_for_when_both_have_it(stepped) -> None:
    state = {"momentum_buffer": np.full(3, 5.0)}
    ticket = stepped.first.receive_request(CLIENT, "load optimizer state", (OPTIMIZER, KEY, state))
    assert not is_answered(stepped.first, ticket)
    stepped.carry()
    assert stepped.first.reply_to(ticket) is None
    stepped.second.lose(PRIMARY)
    for rpc in (stepped.first, stepped.second):
        found = rpc.reply_to(rpc.receive_request(CLIENT, "optimizer state", (OPTIMIZER, KEY)))
        assert found["momentum_buffer"].tolist() == [5] * 3


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("make optimizer", (OPTIMIZER, b"no pickle", [(KEY, False)])),
        ("load optimizer state", (OPTIMIZER, KEY, {})),  # of no optimizer
    ],
)
def test_what_fails_on_both_is_no_difference(pair, capsys, kind, body) -> None:
    ticket = pair.first.receive_request(CLIENT, kind, body)
    pair.carry()
    with pytest.raises((RuntimeError, errors.NotFoundError)):
        pair.first.reply_to(ticket)
    pair.first.receive_request(CLIENT, "update", Updates([add(1, 1)]))
    pair.carry()
    assert pair.values() == [[1] * 3] * 2
    assert capsys.readouterr().err == ""


def push(pair: Pair, worker: int, gradient: float, number: int, n: int) -> None:
    """A gradient for the round of this number, to the first server."""
    operand = [inline(np.full(3, float(gradient)))]
    update = Update(
        KEY, GradientMethod(OPTIMIZER, {"lr": 1.0}, number), operand, session_of(worker), n
    )
    pair.first.receive_request(worker, "update", Updates([update]))


def test_a_round_ends_on_both_as_it_did_on_the_first(stepped) -> None:
    """Which the death of a worker comes to before its notice, and to the other after it."""
    push(stepped, CLIENT, 1, 0, 0)
    push(stepped, OTHER, 100, 0, 0)
    stepped.carry()
    for worker in (CLIENT, OTHER):
        stepped.second.receive_notice(worker, ENDED, (1, None))
    assert stepped.values() == [[0] * 3] * 2  # it is for the first to say
    stepped.first.receive_notice(CLIENT, ENDED, (1, None))
    stepped.first.lose(OTHER)
    stepped.carry()
    assert stepped.values() == [[-1] * 3] * 2


def test_gradients_of_the_dead_are_dropped_on_both_whatever_comes_first(stepped) -> None:
    push(stepped, OTHER, 100, 0, 0)
    stepped.second.lose(OTHER)
    stepped.carry()
    stepped.first.lose(OTHER)
    push(stepped, CLIENT, 1, 0, 0)
    stepped.first.receive_notice(CLIENT, ENDED, (1, None))
    stepped.carry()
    assert stepped.values() == [[-1] * 3] * 2


def test_a_step_that_is_tried_again_counts_once_on_both(stepped) -> None:
    """The notice that it had failed comes to the other late."""
    push(stepped, CLIENT, 100, 0, 0)
    stepped.first.receive_notice(CLIENT, FAILED, (0, None))
    push(stepped, CLIENT, 1, 0, 1)
    stepped.carry()
    stepped.second.receive_notice(CLIENT, FAILED, (0, None))
    for worker in (CLIENT, OTHER):
        stepped.first.receive_notice(worker, ENDED, (1, None))
    stepped.carry()
    assert stepped.values() == [[-1] * 3] * 2


def test_what_happens_between_rounds_happens_there_on_both(stepped) -> None:
    push(stepped, CLIENT, 1, 0, 0)
    for worker in (CLIENT, OTHER):
        stepped.second.receive_notice(worker, ENDED, (1, None))
        stepped.first.receive_notice(worker, ENDED, (1, None))
    doubled = Update(KEY, "assign", [inline(np.full(3, 50.0))], session_of(OTHER), 0)
    stepped.first.receive_request(OTHER, "update", Updates([doubled]))
    stepped.carry()
    assert stepped.values() == [[50] * 3] * 2


def test_a_worker_begins_when_both_have_ended_the_round(stepped) -> None:
    push(stepped, CLIENT, 1, 0, 0)
    for worker in (CLIENT, OTHER):
        stepped.first.receive_notice(worker, ENDED, (1, None))
    ticket = stepped.first.receive_request(CLIENT, MAY_BEGIN, 1)
    assert not is_answered(stepped.first, ticket)
    stepped.carry()
    assert stepped.first.reply_to(ticket) == 1


def test_who_goes_on_ends_the_rounds_that_the_first_had_not(stepped) -> None:
    """Without the gradients of those that have died in them."""
    push(stepped, CLIENT, 1, 0, 0)
    push(stepped, OTHER, 100, 0, 0)
    stepped.carry()
    stepped.second.receive_notice(CLIENT, ENDED, (1, None))
    stepped.second.lose(OTHER)
    stepped.second.lose(PRIMARY)
    assert stepped.values()[1] == [-1] * 3
