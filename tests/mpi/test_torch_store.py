"""Stores by which the ranks of a torch group find each other."""

from mpi4py import MPI

from mpistrat.communicators.torch_store import Ranks, opener_of_store

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def test_groups_over_other_ranks_of_a_node_have_stores_of_their_own() -> None:
    half = RANK // 2  # with four ranks, two groups of two
    store = opener_of_store(Ranks(WORLD.Split(half)))()
    store.set(f"group {half}", "is here")
    WORLD.Barrier()
    groups = range((SIZE + 1) // 2)
    assert [group for group in groups if store.check([f"group {group}"])] == [half]
    WORLD.Barrier()
