"""A rank's share of the CPUs that it may run on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.machine.cpu_share import intra_op_threads, users_threads


@pytest.mark.parametrize(
    ("masks", "threads"),
    [
        ([{0, 1, 2, 3}], 4),
        ([{0, 1, 2, 3}] * 2, 2),
        ([{0, 1, 2}] * 3, 1),
        ([{0, 1}] * 8, 1),
        ([{0, 1}, {2, 3, 4}], 2),
        ([set(range(8)), {0}], 7),
        ([set(range(30))] * 3, 10),
        ([{0}, set()], 1),
    ],
)
def test_the_share_of_the_first_rank(masks, threads):
    assert intra_op_threads(masks[0], masks) == threads


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_nobody_gets_more_than_its_mask_and_all_together_fit(masks):
    threads = [intra_op_threads(mask, masks) for mask in masks]
    assert all(1 <= mine <= len(mask) for mine, mask in zip(threads, masks, strict=True))
    assert sum(mine - 1 for mine in threads) <= len(set().union(*masks))


def test_the_user_s_choice_is_seen():
    assert users_threads({"OMP_NUM_THREADS": "4"})
    assert users_threads({"MKL_NUM_THREADS": "4"})
    assert not users_threads({"OMP_NUM_THREADS": "", "TORCH_NUM_THREADS": "4"})


def test_what_the_user_set() -> None:
    environ = {"OMP_NUM_THREADS": " 8 ", "MKL_NUM_THREADS": "", "HOME": "/root"}
    assert users_threads(environ) == {"OMP_NUM_THREADS": "8"}
