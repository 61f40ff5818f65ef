"""Assigns the cores of each rank to the rank's replicas."""

from __future__ import annotations

import collections

from mpistrat.xla.topology.device_assignment import DeviceAssignment
from mpistrat.xla.topology.topology import TpuTopology


def replicas_of_rank(
    assignment: DeviceAssignment | None, topology: TpuTopology, rank: int
) -> list[tuple[int, ...]]:
    """Return a tuple for each replica of `rank`: the numbers of the replica's cores, counted from 0 on the rank.

    Called by: `TPUStrategy`, on every rank.
    Args:
        assignment: the cores of each replica of the job; None makes each core a replica.
        topology: the mesh of the job's devices; its task number t is rank t.
    Raises:
        ValueError: on all ranks, if the assignment is for another topology, gives a replica cores of several ranks, or
            gives a core to two replicas. Also if ranks would have different numbers of replicas, or none. Also if a
            rank would run several replicas of several cores, or several of its cores but not all.
    """
    here = topology.num_tpus_per_task
    if assignment is None:
        return [(core,) for core in range(here)]
    if assignment.topology != topology:
        raise ValueError(
            f"the device assignment was built for {assignment.topology!r:.120}, the job has {topology!r:.120}: build "
            "it with the topology that initialize_tpu_system returned"
        )
    replicas_of_ranks = _replicas_of_ranks(assignment, topology)
    counts = [len(replicas_of_ranks[task]) for task in range(topology.num_tasks)]
    if len(set(counts)) > 1 or not counts[0]:
        raise ValueError(
            f"the device assignment gives the ranks {counts} replicas; all ranks need equally many, at least one each: "
            f"ask for a multiple of {topology.num_tasks}, or start fewer ranks"
        )
    # XLA runs a program on one core of the rank or on all of them.
    several = counts[0]
    cores = assignment.num_cores_per_replica
    used = several * cores
    if several > 1 and cores > 1:
        raise ValueError(
            f"each rank would run {several} replicas of {cores} cores; a rank can run several replicas of one core, "
            f"or one of several cores: start {several} ranks per host, each with {cores} of the cores"
        )
    if 1 < used < here:
        raise ValueError(
            f"a program on several cores runs on all that its rank has, {here}, and {used} were assigned; use all "
            f"{here}, or show the rank fewer (TPU_VISIBLE_CHIPS; on the CPU device CPU_NUM_DEVICES={used})"
        )
    return replicas_of_ranks[rank]


def _replicas_of_ranks(
    assignment: DeviceAssignment, topology: TpuTopology
) -> dict[int, list[tuple[int, ...]]]:
    """Return a dict from each rank to a list with a tuple per replica: the numbers of its cores, from 0 on the rank.

    Raises: ValueError if a replica has cores of several ranks, or if two replicas share a core.
    """
    found = collections.defaultdict(list)
    users: dict[tuple[int, int], int] = {}
    for replica, cores in enumerate(assignment.core_assignment.tolist()):
        tasks = {topology.task_ordinal_at_coordinates(core) for core in cores}
        if len(tasks) > 1:
            raise ValueError(
                f"replica {replica} has cores of the ranks {sorted(tasks)}: a replica is one rank's. Start one rank "
                f"per host, or give it at most {topology.num_tpus_per_task} cores, as many as a rank has"
            )
        (task,) = tasks
        ordinals = [topology.tpu_device_ordinal_at_coordinates(core) for core in cores]
        for ordinal in ordinals:
            other = users.setdefault((task, ordinal), replica)
            if other != replica:
                raise ValueError(
                    f"replicas {other} and {replica} both have core {ordinal} of rank {task}"
                )
        found[task].append(tuple(ordinals))
    return found
