"""Finds the node of each task of a Slurm step, from each node's number of tasks and the distribution of tasks."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpistrat.errors import TopologyError


class TaskPlacement(NamedTuple):
    """The node on which Slurm runs one task.

    Attributes:
        node: position of the node in Slurm's list of the step's nodes, from 0.
        host: the node's name.
        local_rank: position of the task among its node's tasks, in the order of task numbers, from 0.
    """

    node: int
    host: str
    local_rank: int


def place_tasks(
    tasks_of_nodes: Sequence[tuple[str, int]],
    distribution: str = "block",
    host_of_task: Sequence[str] = (),
) -> list[TaskPlacement]:
    """Return the node and the local rank of every task, in the order of Slurm's task numbers.

    Args:
        tasks_of_nodes: (host, number of tasks) of each node, in Slurm's order.
        distribution: a value of `srun -m`. "block" fills one node after the other. "cyclic" gives every node one task
            in turn, and "plane=2" gives it two; full nodes are skipped. The part after the first ":" or "," is about
            cores and has no effect here.
        host_of_task: the host of each task, for the distribution "arbitrary".
    Raises: TopologyError if the distribution is unknown, or if `host_of_task` contradicts `tasks_of_nodes`.
    """
    nodes = _nodes_of_tasks(tasks_of_nodes, re.split("[:,]", distribution)[0], host_of_task)
    local_ranks: dict[int, Iterator[int]] = collections.defaultdict(itertools.count)
    return [TaskPlacement(node, tasks_of_nodes[node][0], next(local_ranks[node])) for node in nodes]


def _nodes_of_tasks(
    tasks_of_nodes: Sequence[tuple[str, int]], distribution: str, host_of_task: Sequence[str]
) -> list[int]:
    counts = [count for _, count in tasks_of_nodes]
    if distribution in ("block", "unknown", "*", ""):
        return _dealt(counts, max(counts, default=1))
    if in_turn := re.fullmatch(r"cyclic|plane=(?!0+$)([0-9]{1,9})", distribution):
        return _dealt(counts, int(in_turn[1] or 1))
    if distribution == "arbitrary" and host_of_task:
        if collections.Counter(host_of_task) != collections.Counter(dict(tasks_of_nodes)):
            raise TopologyError(
                f"SLURM_ARBITRARY_NODELIST has the tasks on {list(host_of_task)!r:.200}, but the step's nodes have "
                f"{list(tasks_of_nodes)!r:.200}"
            )
        hosts = [host for host, _ in tasks_of_nodes]
        return [hosts.index(host) for host in host_of_task]
    raise TopologyError(
        f"the task distribution {distribution!r:.80} (SLURM_DISTRIBUTION) does not say which task runs where (known: "
        f"block, cyclic, plane with SLURM_DIST_PLANESIZE, and arbitrary with SLURM_ARBITRARY_NODELIST); "
        f"MPIClusterResolver asks MPI instead"
    )


def _dealt(counts: list[int], at_once: int) -> list[int]:
    """Return the position of each task's node, in task order, if the nodes in turn get up to `at_once` tasks.

    Args: counts: the number of tasks that each node gets in the end; a full node is skipped.
    """
    turns = [(task // at_once, node) for node, count in enumerate(counts) for task in range(count)]
    return [node for _, node in sorted(turns)]
