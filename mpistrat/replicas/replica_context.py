"""What one replica can do inside `run`: talk to the other replicas."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays, context, nest
from mpistrat.context import AnyStrategy, check_call, require_replica
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.values import DistributedValues, select_replica

_THE_ONE = operator.itemgetter(0)


class ReplicaContext:
    """The view of one replica, from `get_replica_context()` inside `run`.

    Args:
        strategy: the strategy that runs the replica.
        replica_id_in_sync_group: the replica's number among all replicas of all ranks, or None where
            it is not known yet.
        local_index: its number among the replicas of this rank.
    """

    def __init__(
        self, strategy: AnyStrategy, replica_id_in_sync_group: Any, local_index: int = 0
    ) -> None:
        replica_id = replica_id_in_sync_group
        if not _is_replica_id(replica_id):
            raise ValueError(
                f"replica_id_in_sync_group must be an integer or None, got {replica_id!r:.60}"
            )
        self._strategy, self._replica_id, self.local_index = strategy, replica_id, local_index

    def __str__(self) -> str:
        return f"replica {self.replica_id_in_sync_group}"

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._strategy

    @functools.cached_property
    def _extended(self) -> Any:
        return self._strategy.extended

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, 0 <= id < num_replicas_in_sync."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas there are, over all ranks."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one name."""
        require_replica(self, "devices")
        return (self._strategy.extended.worker_devices[self.local_index],)

    def own_component(self, value: DistributedValues) -> Any:
        """What this replica has of `value`."""
        return select_replica(self.local_index, value)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once, in the cross-replica context.

        Called by: every replica of this rank, equally often; it returns when all have.
        Args:
            merge_fn: replica 0's is the one that is called. Its arguments are the replicas' arguments,
                regrouped as `run` regroups results; with one replica per rank they arrive as they are.
        Returns:
            what it returned, each replica its own component of distributed values.
        Raises:
            RuntimeError: outside this replica's run, or when the replicas call it unequally often.
        """
        require_replica(self, "merge_call")
        check_call("merge_call", merge_fn, args, kwargs)
        return self._strategy.extended.replicas.merge_call(
            self, merge_fn, tuple(args), dict(kwargs or {})
        )

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Combine `value` over all replicas.

        Called by: every replica, in the same order.   Context: replica.
        Args:
            reduce_op: a `ReduceOp`, or its name in any case.
            value: a nest of arrays, numbers and `IndexedSlices`; same structure, shapes and dtypes on
                every replica.
        Returns:
            the same structure, equal on every replica. Sums and means of torch tensors are differentiable to any
            order: the gradient is the same reduction of the upstream gradients.
        Raises:
            CollectiveMismatchError: on all ranks, when the ranks' operands differ.
            InvalidArgumentError: when those of one rank's replicas differ.
            NotImplementedError: on all ranks, for MAX, MIN or PRODUCT of a tensor that requires a gradient, or of
                `IndexedSlices`.
            RuntimeError: outside this replica's run.
        """
        require_replica(self, "all_reduce")
        extended = self._extended
        try:
            op = ReduceOp.parse(reduce_op)
        except ValueError as error:
            extended.communicator.raise_together(error)
        plain = value.__class__ is np.ndarray  # no structure, and nothing that autograd knows
        whole = plain or arrays.is_array(value)
        leaves, label, pack = ([value], "", _THE_ONE) if whole else nest.take_apart(value)
        if not leaves:
            return value
        if not plain and _needs_gradient(leaves):
            if not op.adds_up:
                extended.communicator.raise_together(
                    NotImplementedError(
                        f"all_reduce({op.name}) of a tensor that requires a gradient has none: give it "
                        "tensor.detach(), or call it under torch.no_grad(). SUM and MEAN are differentiable"
                    )
                )
            from mpistrat.replicas import differentiable

            reduced = differentiable.all_reduce(self, op, leaves, options, label)
        else:
            reduced = extended.replicas.all_reduce(self, op, leaves, options, label)
        return pack(reduced)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate `value` of all replicas along `axis`, in replica order.

        Called by: every replica, in the same order.   Context: replica.
        Args:
            value: a nest of arrays of at least one dimension; sizes may differ along `axis` only.
            axis: counted from the end if negative.
        Returns:
            the same structure, equal on every replica. Differentiable to any order for torch tensors: each
            replica gets its own slice of the sum of the upstream gradients.
        Raises:
            ValueError: `axis` is out of range. InvalidArgumentError: shapes differ elsewhere.
            NotImplementedError: for `IndexedSlices`.
        """
        require_replica(self, "all_gather")
        extended = self._strategy.extended
        whole = arrays.is_array(value)
        flat, label, pack = ([value], "", _THE_ONE) if whole else nest.take_apart(value)
        if any(isinstance(leaf, IndexedSlices) for leaf in flat):
            extended.communicator.raise_together(
                NotImplementedError("all_gather does not support IndexedSlices; use all_reduce")
            )
        gathered = []
        for leaf in flat:
            if _needs_gradient([leaf]):
                from mpistrat.replicas import differentiable

                call = differentiable.DifferentiableAllGather.apply
                gathered.append(call(self, axis, options, leaf))
            else:
                gathered.append(extended.replicas.all_gather(self, leaf, axis, options, label))
        return pack(gathered)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(replica {self._replica_id} of {self.num_replicas_in_sync}, "
            f"{self._strategy!r})"
        )


def _is_replica_id(value: Any) -> bool:
    if arrays.is_array(value):
        return arrays.is_integer(value) and value.ndim == 0
    return isinstance(value, (int, np.integer, type(None))) and not isinstance(value, bool)


def _needs_gradient(leaves: Sequence[Any]) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    tensor = torch.Tensor
    for leaf in leaves:  # noqa: SIM110 - a generator takes as long as a small reduction
        if isinstance(leaf, tensor) and leaf.requires_grad:
            return True
    return False


def get_replica_context() -> ReplicaContext | None:
    """The context of the replica that this thread runs; None in a cross-replica context."""
    mode: Any = context.current_mode()
    return mode.replica_context
