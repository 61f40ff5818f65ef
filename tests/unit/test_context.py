"""Who is in force on a thread."""

import concurrent.futures
import copy
import threading

import pytest

import mpistrat as ms


@pytest.fixture
def strategy():
    return ms.MirroredStrategy(["cpu:0", "cpu:1"])


def here():
    return ms.has_strategy(), ms.in_cross_replica_context(), ms.get_replica_context() is not None


def test_the_default_strategy_is_below_everything():
    assert here() == (False, False, True)
    default = ms.get_strategy()
    assert default is ms.get_strategy()
    assert default.num_replicas_in_sync == 1
    assert ms.get_replica_context().replica_id_in_sync_group == 0
    with default.scope():
        assert here() == (False, False, True)


def test_modes(strategy):
    with strategy.scope():
        assert here() == (True, True, False)
        inside = strategy.run(here)
        assert strategy.experimental_local_results(inside[0]) == (True, True)
        assert strategy.experimental_local_results(inside[1]) == (False, False)
        assert here() == (True, True, False)
    assert here() == (False, False, True)


def test_merge_calls_are_in_the_cross_replica_context(strategy):
    def replica():
        return ms.get_replica_context().merge_call(lambda merged: (merged is strategy, here()))

    merged, (has, cross, _) = strategy.run(replica)
    assert strategy.experimental_local_results(merged) == (True, True)
    assert strategy.experimental_local_results(has) == (True, True)
    assert strategy.experimental_local_results(cross) == (True, True)


def test_a_new_thread_starts_from_the_bottom(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(here()))
        thread.start()
        thread.join()
    assert seen == [(False, False, True)]


def test_the_default_strategy_inside_another(strategy):
    default = ms.get_strategy()
    with strategy.scope(), pytest.raises(RuntimeError, match="inside another"):
        default.scope()
    with pytest.raises(RuntimeError, match="one default strategy"):
        type(default)()


def test_another_strategy_inside_the_default(strategy):
    with ms.get_strategy().scope(), strategy.scope():
        assert here() == (True, True, False)
        assert ms.Variable(1.0).strategy is strategy
    assert here() == (False, False, True)


def test_a_set_strategy_is_replaced_and_unset(strategy):
    other = ms.OneDeviceStrategy("cpu:0")
    try:
        for chosen in (strategy, other):
            ms.experimental_set_strategy(chosen)
            assert ms.get_strategy() is chosen
    finally:
        ms.experimental_set_strategy(None)
    assert not ms.has_strategy()
    ms.experimental_set_strategy(None)


def test_a_refused_strategy_leaves_the_set_one_in_force(strategy):
    other = ms.OneDeviceStrategy("cpu:0")
    ms.experimental_set_strategy(strategy)
    try:
        with strategy.scope(), pytest.raises(RuntimeError, match="outside every scope"):
            ms.experimental_set_strategy(other)
        assert ms.get_strategy() is strategy
        with concurrent.futures.ThreadPoolExecutor() as threads:
            threads.submit(ms.experimental_set_strategy, None).result()
        assert ms.get_strategy() is strategy
    finally:
        ms.experimental_set_strategy(None)
    assert not ms.has_strategy()


def test_a_context_that_a_module_keeps_is_copied_with_it(strategy):
    with strategy.scope():
        copies = strategy.run(lambda: copy.deepcopy([ms.get_replica_context()])[0].local_index)
    assert strategy.experimental_local_results(copies) == (0, 1)
    context = ms.get_replica_context()
    assert copy.deepcopy({"kept": context})["kept"] is context
