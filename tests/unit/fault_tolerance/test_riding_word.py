"""What rides on a reduction: the greatest since somebody looked."""

import numpy as np

from mpistrat.fault_tolerance.riding_word import RidingWord


def test_nothing_rode() -> None:
    assert RidingWord(lambda: 7).take() is None


def test_the_greatest_since_it_was_taken() -> None:
    word = RidingWord(lambda: 7)
    assert word.board().tolist() == [7]
    for greatest in (0, 9, 3):
        word.arrive(np.array([greatest], np.int32))
    assert word.take() == 9
    assert word.take() is None
    word.arrive(np.array([0], np.int32))
    assert word.take() == 0
