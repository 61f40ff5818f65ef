"""A rank's fair share of the CPUs that it may run on, and the number of intra-op threads that fits this share."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

# Variables that torch and the libraries below it read. There is no TORCH_NUM_THREADS.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # "8"


def cpu_share(my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]) -> Fraction:
    """Return this rank's share of the node's CPUs, a Fraction. A CPU for n local ranks counts as 1 / n for each.

    Args:
        my_cpus: the CPU numbers of this rank's affinity mask.
        cpus_of_local_ranks: the masks of all ranks of the node, with this rank's.
    """
    from fractions import Fraction  # here, because it makes importing mpistrat slower

    users = collections.Counter(itertools.chain(*map(set, cpus_of_local_ranks)))
    # Fractions, because in floats a sum of three thirds may be less than 1
    shares = (Fraction(1, max(1, users[cpu])) for cpu in set(my_cpus))
    return sum(shares, Fraction())


def intra_op_threads(
    my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]
) -> int:
    """Return the number of threads for this rank: its share of the CPUs, rounded down, at least 1.

    Args:
        my_cpus: the CPU numbers of this rank's affinity mask.
        cpus_of_local_ranks: the masks of all ranks of the node, with this rank's.
    """
    return max(1, int(cpu_share(my_cpus, cpus_of_local_ranks)))


def fixed_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return a number of threads that does not depend on the node's ranks: the user's OMP_NUM_THREADS, else 1.

    The first number of a list counts: 4 for "4,2".
    """
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0].strip()
    return max(1, int(first)) if re.fullmatch("[0-9]{1,5}", first) else 1


def users_threads(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for numbers of threads that the user has set: {"OMP_NUM_THREADS": "8"}; {} if none.

    If the user has set any, nothing in mpistrat chooses a number of threads.
    """
    texts = {name: environ.get(name, "").strip() for name in THREAD_COUNTS}
    return {name: text for name, text in texts.items() if text}
