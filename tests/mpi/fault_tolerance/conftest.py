"""A strategy over all ranks, in the ways of support.training.ways_to_mirror."""

from support.training.ways_to_mirror import one_thread_per_rank as one_thread_per_rank
from support.training.ways_to_mirror import strategy as strategy
