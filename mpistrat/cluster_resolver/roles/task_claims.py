"""Exchanges the task that each rank's resolver or TF_CONFIG names, and compares the tasks with MPI's ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.task_roles import TASK_TYPES, task_count
from mpistrat.cluster_resolver.tf_config import TF_CONFIG, TFConfigClusterResolver
from mpistrat.errors import TopologyError
from mpistrat.settings import Environment
from mpistrat.topology import Topology

_BY_MPI_ALONE = "give cluster_resolver=MPIClusterResolver() to go by MPI alone"


@dataclass(frozen=True)
class TaskClaim:
    """The task that one rank's resolver or TF_CONFIG names; sent to all ranks.

    Attributes:
        source: "TF_CONFIG", or the class of the rank's resolver, for messages; "" without both.
        cluster_spec: the cluster that the source describes; None without a source.
        task_type, task_id: the rank's task in that cluster; None if the source does not name it.
        error: the error that the rank has found; None if there was no error. `exchange` raises the error of the first
            rank that has one, on all ranks.
    """

    source: str = ""
    cluster_spec: ClusterSpec | None = None
    task_type: str | None = None
    task_id: int | None = None
    error: ValueError | TopologyError | None = None


Claim = TypeVar("Claim", bound=TaskClaim)


def _picklable(error: Exception) -> ValueError | TopologyError:
    """Return a new ValueError or TopologyError with the text of `error`, because other errors may not be picklable.

    A TopologyError is made of any error that is neither.
    """
    for kind in (ValueError, TopologyError):
        if isinstance(error, kind):
            return kind(str(error))
    return TopologyError(f"{type(error).__name__}: {error}")


def exchange(
    make_claim: Callable[[], Claim], all_gather_object: Callable[[Any], list[Any]]
) -> list[Claim]:
    """Make this rank's claim (the task that its resolver names), and return the claims of all ranks, in rank order.

    Called by: every rank.
    Args: all_gather_object: takes this rank's object, and returns the objects of all ranks, in rank order.
    Raises: on all ranks, the error of `make_claim` on the first rank that has one, as ValueError or TopologyError. The
        text names the rank, unless all ranks have the same error.
    """
    cause: Exception | None = None
    claim: TaskClaim
    try:
        claim = make_claim()
    except Exception as error:
        cause = error
        claim = TaskClaim(error=_picklable(error))
    claims = all_gather_object(claim)
    texts = {str(claim.error) for claim in claims}
    for rank, failed in enumerate(claims):
        if failed.error is not None:
            text = str(failed.error)
            if len(texts) > 1:
                text = f"rank {rank}: {text}"
            raise type(failed.error)(text) from cause
    return claims


def check_same_cluster(claims: Sequence[TaskClaim]) -> None:
    """Raise TopologyError, on all ranks alike, if two claims have different clusters, or if only one has a cluster."""
    first = claims[0]
    for rank, claim in enumerate(claims):
        if claim.cluster_spec != first.cluster_spec:
            raise TopologyError(
                f"rank 0 has {describe_cluster(first)}, and rank {rank} {describe_cluster(claim)}: all ranks need the "
                "same cluster, each with a task of its own"
            )


def describe_cluster(claim: TaskClaim) -> str:
    if claim.cluster_spec is None:
        return f"no cluster ({TF_CONFIG} names none)"
    return f"the cluster {claim.cluster_spec.as_dict()!r:.300} ({claim.source})"


def names_cluster(environ: Environment) -> bool:
    """Return whether TF_CONFIG describes a cluster with tasks; False if it is not set.

    True also if TF_CONFIG is malformed, so that the caller reads it and gets the error.
    """
    with contextlib.suppress(ValueError):
        resolver = TFConfigClusterResolver(environ=environ)
        return bool(environ.get(TF_CONFIG) and resolver.cluster_spec())
    return True


def resolver_of_trainers(
    topology: Topology,
    all_gather_object: Callable[[Any], list[Any]],
    resolver: ClusterResolver | None,
    *,
    asks_tf_config: bool,
) -> ClusterResolver | None:
    """Check that the resolver's or TF_CONFIG's ranks are MPI's ranks, and return the resolver that names their tasks.

    Called by: `MultiWorkerMirroredStrategy`, on every rank. Communicates once.
    Args:
        topology: MPI's topology.
        all_gather_object: takes this rank's object, and returns the objects of all ranks, in rank order.
        resolver: the strategy's argument; None if there was none.
        asks_tf_config: whether to use TF_CONFIG if `resolver` is None.
    Returns: `resolver`, or, without one, a resolver of TF_CONFIG. None: the caller takes MPI's resolver, because
        `resolver` is an MPIClusterResolver, or because there is no `resolver` and TF_CONFIG is not set, says only that
        this process is alone, or is not to be used.
    Raises: on all ranks, TopologyError if the resolver or TF_CONFIG contradicts MPI, or if the ranks' TF_CONFIGs have
        different clusters; ValueError if a rank's task is not known, malformed, or (of a resolver) a parameter server.
    """
    found = resolver
    if isinstance(resolver, MPIClusterResolver):
        found = None

    def claim() -> TaskClaim:
        nonlocal found
        if resolver is None and asks_tf_config and os.environ.get(TF_CONFIG):
            found = _of_tf_config(topology)
        if found is None:
            return TaskClaim()
        _compare(found, topology, of_tf_config=resolver is None)
        if resolver is not None:
            return TaskClaim(TF_CONFIG)
        return TaskClaim(TF_CONFIG, found.cluster_spec())

    check_same_cluster(exchange(claim, all_gather_object))
    return found


def _of_tf_config(topology: Topology) -> TFConfigClusterResolver | None:
    """Return a resolver of TF_CONFIG; None if TF_CONFIG only says that this process is alone.

    Some platforms set such a TF_CONFIG in every process, so only MPI's ranks count then. If MPI has several ranks, it
    is a TF_CONFIG without a cluster and without an index above 0. If MPI has one rank, it is a TF_CONFIG with at most
    one task, and not with the type chief, worker, ps or evaluator.

    Raises: TopologyError if TF_CONFIG makes this rank a parameter server, or one of several ranks an evaluator.
    """
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    job = resolver.task_type
    index = resolver.task_id
    if job == "ps" or (job == "evaluator" and topology.size > 1):
        trainers = task_count(spec, "chief") + task_count(spec, "worker")
        raise TopologyError(
            f"{TF_CONFIG} says that this is {job} {index} (tasks that train: {trainers}), MPI says that this is rank "
            f"{topology.rank} of {topology.size}, and all ranks of a MultiWorkerMirroredStrategy train: use a "
            f"ParameterServerStrategy, which has servers; start an evaluator by itself; unset {TF_CONFIG}, or "
            + _BY_MPI_ALONE
        )
    if topology.size > 1:
        names_others = bool(spec or index)
    else:
        tasks = sum(spec.num_tasks(name) for name in spec.jobs)
        names_others = tasks > 1 or job in TASK_TYPES
    return resolver if names_others else None


def _compare(found: ClusterResolver, topology: Topology, *, of_tf_config: bool) -> None:
    """Raise TopologyError if the rank or the number of ranks that `found` says is not MPI's.

    Args: of_tf_config: whether `found` reads TF_CONFIG; the message then says so.
    """
    claimed = found.topology()
    if (claimed.rank, claimed.size) == (topology.rank, topology.size):
        return
    source = type(found).__name__
    ignoring = ""
    if of_tf_config:
        source = f"{TF_CONFIG} ({found.cluster_spec().as_dict()!r:.200})"
        ignoring = "unset it, or "
    raise TopologyError(
        f"{source} says this is rank {claimed.rank} of {claimed.size}, MPI says rank {topology.rank} of "
        f"{topology.size}; start one process per task, with MPI's launcher, or {ignoring}{_BY_MPI_ALONE}"
    )
