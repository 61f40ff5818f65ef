"""A rank's fair share of the CPUs that it is allowed on, and how many intra-op threads it should run there."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

# What torch and the libraries that it calls read; TORCH_NUM_THREADS does not exist
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # "8"


def cpu_share(my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]) -> Fraction:
    """How many CPUs a rank has: each counts as 1 / (number of local ranks allowed on it).

    Args: my_cpus: this rank's affinity mask.
        cpus_of_local_ranks: the masks of all ranks of the node, this one's included.
    """
    from fractions import Fraction  # here, because it makes importing mpistrat slower

    users = collections.Counter(itertools.chain(*map(set, cpus_of_local_ranks)))
    # fractions, because 3 * (1/3) in floats may be less than 1
    shares = (Fraction(1, max(1, users[cpu])) for cpu in set(my_cpus))
    return sum(shares, Fraction())


def intra_op_threads(
    my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]
) -> int:
    """Threads for this rank: its share, rounded down, at least 1. Args: as of `cpu_share`."""
    return max(1, int(cpu_share(my_cpus, cpus_of_local_ranks)))


def fixed_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Threads that do not depend on how many ranks share a node: the user's OMP_NUM_THREADS ("4", "4,2"), or 1."""
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0].strip()
    return max(1, int(first)) if re.fullmatch("[0-9]{1,5}", first) else 1


def users_threads(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user set: {"OMP_NUM_THREADS": "8"}. Where that is anything, nobody else chooses a number of threads."""
    texts = {name: environ.get(name, "").strip() for name in THREAD_COUNTS}
    return {name: text for name, text in texts.items() if text}
