"""A word that travels with reductions: the greatest since it was taken."""

import numpy as np

from mpistrat.fault_tolerance.preemption_checkpoint_handler import PiggybackedWord


def test_nothing_was_reduced() -> None:
    assert PiggybackedWord(lambda: 7).take() is None


def test_the_greatest_since_it_was_taken() -> None:
    word = PiggybackedWord(lambda: 7)
    assert word.words().tolist() == [7]
    for greatest in (0, 9, 3):
        word.received(np.array([greatest], np.int32))
    assert word.take() == 9
    assert word.take() is None
    word.received(np.array([0], np.int32))
    assert word.take() == 0
