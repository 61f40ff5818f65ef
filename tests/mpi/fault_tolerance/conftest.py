"""A strategy over all ranks, in the ways of ways_to_mirror."""

from ways_to_mirror import _one_thread_per_rank as _one_thread_per_rank
from ways_to_mirror import strategy as strategy
