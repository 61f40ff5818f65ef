"""A rank's fair share of the CPUs that it may run on, and the number of intra-op threads that fits this share."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mpistrat.settings import Environment

if TYPE_CHECKING:
    from fractions import Fraction

# Variables that torch and the libraries below it read. There is no TORCH_NUM_THREADS.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # "8"


def cpu_share(my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]) -> Fraction:
    """Return how many CPUs this rank has, as a Fraction: a CPU that n ranks of the node may use counts as 1 / n.

    Args:
        my_cpus: the CPU numbers of this rank's affinity mask.
        cpus_of_local_ranks: the masks of all ranks of the node, also of this rank.
    """
    from fractions import Fraction  # imported here, so that `import mpistrat` stays fast

    users = collections.Counter[int]()
    for cpus in cpus_of_local_ranks:
        users.update(set(cpus))
    share = Fraction()  # no float, because there a sum of three thirds may be less than 1
    for cpu in set(my_cpus):
        share += Fraction(1, max(1, users[cpu]))
    return share


def intra_op_threads(
    my_cpus: Collection[int], cpus_of_local_ranks: Sequence[Collection[int]]
) -> int:
    """Return the number of threads for this rank: its `cpu_share`, rounded down, at least 1.

    Args:
        my_cpus: the CPU numbers of this rank's affinity mask.
        cpus_of_local_ranks: the masks of all ranks of the node, also of this rank.
    """
    return max(1, int(cpu_share(my_cpus, cpus_of_local_ranks)))


def fixed_threads(environ: Environment = os.environ) -> int:
    """Return a number of threads that does not depend on the node's ranks: the user's OMP_NUM_THREADS, else 1.

    Called by: strategies with `deterministic=True`. Of a list, the first number counts: 4 for "4,2". 1 also for any
    other text.
    """
    text = environ.get("OMP_NUM_THREADS", "")
    first = text.split(",")[0].strip()
    if re.fullmatch("[0-9]{1,5}", first):
        return max(1, int(first))
    return 1


def users_threads(environ: Environment = os.environ) -> dict[str, str]:
    """Return the variables for numbers of threads that the user has set: {"OMP_NUM_THREADS": "8"}; {} if none.

    The callers then leave torch's number of threads as it is.
    """
    return {name: text for name in THREAD_COUNTS if (text := environ.get(name, "").strip())}
