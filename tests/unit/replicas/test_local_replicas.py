"""Several replicas in one rank: whose turn it is, how they meet, and what an error leaves behind."""

import contextlib
import gc
import threading

import pytest

from mpistrat.replicas.local_replicas import LocalReplicas


@pytest.fixture
def three():
    return LocalReplicas(3)


def test_results_in_replica_order(three):
    assert three.run(lambda i: i * i) == [0, 1, 4]


def test_they_run_one_at_a_time_up_to_where_they_meet(three):
    order = []

    def body(i):
        order.append(f"a{i}")
        total = three.meet(i, lambda operands: order.append("merge") or sum(operands, ()), (i,))
        order.append(f"b{i}")
        three.meet(i, lambda operands: order.append("merge"), ())
        order.append(f"c{i}")
        return total

    assert three.run(body) == [(0, 1, 2)] * 3
    assert " ".join(order) == "a0 a1 a2 merge b0 b1 b2 merge c0 c1 c2"


def test_replica_0_is_the_calling_thread(three):
    threads = three.run(lambda i: threading.current_thread())
    assert threads[0] is threading.current_thread()
    assert len(set(threads)) == 3


def test_threads_are_used_again_and_end_with_their_owner(three):
    threads = three.run(lambda i: threading.current_thread())[1:]
    assert three.run(lambda i: threading.current_thread())[1:] == threads
    replicas = LocalReplicas(2)
    (_, other) = replicas.run(lambda i: threading.current_thread())
    del replicas
    gc.collect()
    other.join(30)
    assert not other.is_alive()


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("before_the_meeting", [True, False])
def test_the_first_error_is_raised_and_the_others_unwind(three, failing, before_the_meeting):
    unwound = []

    def body(i):
        with contextlib.ExitStack() as stack:
            stack.callback(unwound.append, i)
            if before_the_meeting and i == failing:
                raise KeyError(i)
            three.meet(i, lambda operands: None, ())
            if i >= failing:
                raise KeyError(i)

    with pytest.raises(KeyError) as raised:
        three.run(body)
    assert raised.value.args == (failing,)
    started = failing + 1 if before_the_meeting else 3
    assert sorted(unwound) == list(range(started))
    assert three.run(lambda i: i) == [0, 1, 2]  # and it works as before


def test_an_error_of_the_merge_function(three):
    def merge(operands):
        raise KeyError("merge")

    with pytest.raises(KeyError, match="merge"):
        three.run(lambda i: three.meet(i, merge, ()))
    assert three.run(lambda i: i) == [0, 1, 2]


@pytest.mark.parametrize("meeting", [[0], [2], [0, 1], [1, 2]])
def test_meeting_unequally_often(three, meeting):
    with pytest.raises(RuntimeError, match="equally often"):
        three.run(lambda i: i in meeting and three.meet(i, len, ()))
    assert three.run(lambda i: i) == [0, 1, 2]


def test_a_run_inside_a_merge_function(three):
    assert (
        three.run(lambda i: three.meet(i, lambda operands: three.run(lambda j: j * 10), ()))
        == [[0, 10, 20]] * 3
    )


def test_states_change_hands(three):
    log = []

    class State:
        def inherit(self):
            return contextlib.nullcontext

        def begin(self):
            log.append("begin")

        def end(self):
            log.append("end")

        def switch(self, leaving, entering):
            log.append((leaving, entering))

    three.states.append(State())
    three.run(lambda i: three.meet(i, len, ()))
    assert log == ["begin", (0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0), "end"]
