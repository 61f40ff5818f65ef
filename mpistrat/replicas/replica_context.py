"""The context of one replica inside `run`. Its methods communicate with the other replicas."""

from __future__ import annotations

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

_THE_ONE: Callable[[list[Any]], Any] = operator.itemgetter(0)


class ReplicaContext:
    """One replica's view of the strategy. `get_replica_context()` returns it inside `run`.

    Args:
        strategy: the strategy that runs the replica.
        replica_id_in_sync_group: the replica's number among all replicas of all ranks; None if it is not known yet.
        local_index: the replica's number among the replicas of this rank.
    Attributes:
        replicas: the `Replicas` that run this replica; None for a context that no strategy has made.
    Raises: ValueError if `replica_id_in_sync_group` is neither an integer nor None.

    Example:
        >>> def step(x):
        ...     context = ms.get_replica_context()
        ...     return context.replica_id_in_sync_group, context.all_reduce("sum", x)
        >>> strategy = ms.OneDeviceStrategy("cpu")
        >>> strategy.run(step, args=(np.ones(2),))
        (0, array([1., 1.]))

    Example:
        >>> with ms.OneDeviceStrategy("cpu").replica() as context:
        ...     print(context.strategy, context.num_replicas_in_sync, context.devices)
        OneDeviceStrategy(1 replicas) 1 ('cpu:0',)
    """

    def __init__(
        self, strategy: AnyStrategy, replica_id_in_sync_group: Any, local_index: int = 0
    ) -> None:
        replica_id = replica_id_in_sync_group
        if not _is_replica_id(replica_id):
            raise ValueError(
                f"replica_id_in_sync_group must be an integer or None, got {replica_id!r:.60}"
            )
        self._strategy = strategy
        self._replica_id = replica_id
        self.local_index = local_index
        self.replicas: Any = None

    def __str__(self) -> str:
        return f"replica {self.replica_id_in_sync_group}"

    def __deepcopy__(self, memo: Any) -> ReplicaContext:
        """Return the context itself: a module that keeps it may be copied."""
        return self

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number among all replicas, 0 <= id < num_replicas_in_sync; None where it is not known."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all ranks."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one name. Raises: RuntimeError outside this replica's run."""
        require_replica(self, "devices")
        return (self._strategy.extended.worker_devices[self.local_index],)

    def own_component(self, value: DistributedValues) -> Any:
        """Return this replica's component of `value`.

        Example:
            >>> ms.get_replica_context().own_component(ms.PerReplica(["first", "second"]))
            'first'
        """
        return select_replica(self.local_index, value)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` once per rank, in the cross-replica context.

        The call waits until all replicas of this rank have called.

        Called by: every replica of this rank, equally often.
        Args:
            merge_fn: the function; of several replicas' functions, replica 0's is called.
            args, kwargs: this replica's arguments. The function gets the arguments of all replicas of the rank, put
                together into `PerReplica` values; with one replica per rank, it gets the arguments as they are.
        Returns:
            the function's result; in place of each distributed value in it, the replica's own component.
        Raises:
            RuntimeError: outside this replica's run, or if the replicas call it unequally often.

        Example:
            >>> def step(x):
            ...     total = lambda strategy, x: strategy.reduce("sum", x, axis=None)
            ...     return ms.get_replica_context().merge_call(total, args=(x,))
            >>> ms.OneDeviceStrategy("cpu").run(step, args=(2.0,))
            2.0
        """
        require_replica(self, "merge_call")
        check_call("merge_call", merge_fn, args, kwargs)
        return self.replicas.merge_call(self, merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Combine `value` over all replicas.

        Called by: every replica, in the same order.   Context: replica.
        Args:
            reduce_op: a `ReduceOp`, or its name in upper or lower case.
            value: a nest of arrays, numbers and `IndexedSlices`, with the same structure, shapes and dtypes on every
                replica.
            options: options of this collective.
        Returns:
            the same structure, equal on every replica. Sums and means of torch tensors are differentiable to any order:
                the gradient is the same reduction of the upstream gradients. The mean of integers is a float.
        Raises:
            CollectiveMismatchError: on all ranks, if the operands differ between ranks.
            InvalidArgumentError: if the operands differ between one rank's replicas; or, on all ranks, if a sum of
                int8, int16, int32 or uint8 does not fit that dtype.
            NotImplementedError: on all ranks, for MAX, MIN or PRODUCT of a tensor that requires a gradient, or of
                `IndexedSlices`.
            RuntimeError: outside this replica's run.
        """
        require_replica(self, "all_reduce")
        replicas = self.replicas
        try:
            op = ReduceOp.parse(reduce_op)
        except ValueError as error:
            replicas.ops.communicator.raise_together(error)
        plain = value.__class__ is np.ndarray  # neither a structure nor a tensor of autograd
        whole = plain or arrays.is_array(value)
        leaves, label, pack = ([value], "", _THE_ONE) if whole else nest.take_apart(value)
        if not leaves:
            return value
        if not plain and _needs_gradient(leaves):
            if not op.adds_up:
                replicas.ops.communicator.raise_together(
                    NotImplementedError(
                        f"all_reduce({op.name}) has no gradient, but a tensor requires one: give it "
                        "tensor.detach(), or call it under torch.no_grad(). SUM and MEAN are differentiable"
                    )
                )
            from mpistrat.replicas import differentiable

            reduced = differentiable.all_reduce(self, op, leaves, options, label)
        else:
            reduced = replicas.all_reduce(self, op, leaves, options, label)
        return pack(reduced)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate `value` of all replicas along `axis`, in replica order.

        Called by: every replica, in the same order.   Context: replica.
        Args:
            value: a nest of arrays of at least one dimension; sizes may differ along `axis` only.
            axis: the dimension; counted from the end if negative.
            options: options of this collective.
        Returns:
            the same structure, equal on every replica. Differentiable to any order for torch tensors: each replica gets
                its own slice of the sum of the upstream gradients.
        Raises:
            ValueError: `axis` is out of range.
            InvalidArgumentError: shapes differ in another dimension.
            NotImplementedError: for `IndexedSlices`.

        Example:
            >>> def step(rows):
            ...     return ms.get_replica_context().all_gather(rows, axis=0)
            >>> ms.OneDeviceStrategy("cpu").run(step, args=(np.ones((2, 3)),)).shape
            (2, 3)
        """
        require_replica(self, "all_gather")
        replicas = self.replicas
        whole = arrays.is_array(value)
        leaves, label, pack = ([value], "", _THE_ONE) if whole else nest.take_apart(value)
        if IndexedSlices in {type(leaf) for leaf in leaves}:
            replicas.ops.communicator.raise_together(
                NotImplementedError("all_gather does not support IndexedSlices; use all_reduce")
            )
        gathered = []
        for leaf in leaves:
            if _needs_gradient([leaf]):
                from mpistrat.replicas import differentiable

                call = differentiable.DifferentiableAllGather.apply
                gathered.append(call(self, axis, options, leaf))
            else:
                gathered.append(replicas.all_gather(self, leaf, axis, options, label))
        return pack(gathered)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(replica {self._replica_id} of {self.num_replicas_in_sync}, "
            f"{self._strategy!r})"
        )


def _is_replica_id(value: Any) -> bool:
    if arrays.is_array(value):
        return arrays.is_integer(value) and value.ndim == 0
    return isinstance(value, (int, type(None))) and not isinstance(value, bool)


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
    """Return the context of the replica that this thread runs; None in a cross-replica context.

    Outside every strategy it is the context of the default strategy's only replica.

    Example:
        >>> with ms.OneDeviceStrategy("cpu").scope():
        ...     print(ms.get_replica_context())
        None
        >>> ms.OneDeviceStrategy("cpu").run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        0
    """
    mode: Any = context.current_mode()
    return mode.replica_context
