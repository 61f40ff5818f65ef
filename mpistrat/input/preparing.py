"""The work of `Strategy.prepare`: mirror modules, check optimizers, distribute datasets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpistrat import arrays
from mpistrat.context import AnyStrategy
from mpistrat.input.distributed_dataset import DistributedDataset
from mpistrat.input.distribution import distribute, distribute_local
from mpistrat.options import InputOptions


def prepare(strategy: AnyStrategy, objects: Sequence[Any], local_batches: bool) -> list[Any]:
    """Mirror the modules in `objects`, and return a list of `objects` with each iterable of batches distributed.

    Modules, optimizers and distributed datasets come back as they are. Called by: every rank, in `Strategy.prepare`.
    Args: local_batches: whether iterables give this rank's part of the data already.
    Raises: TypeError or ValueError, on all ranks, for an object that cannot be prepared.
    """
    extended = strategy.extended
    with extended.communicator.raising_together():
        are_batches = [_are_batches(value, strategy) for value in objects]
        new = _new_modules(strategy, objects)
    if new:
        extended.modules.get().mirror(new)
    if "torch" in sys.modules:
        from mpistrat.pytorch.modules.preparing import check_alike

        arguments = {f"argument {i} of prepare": value for i, value in enumerate(objects, 1)}
        check_alike(extended, arguments)

    def distributed(batches: Any) -> DistributedDataset:
        with extended.communicator.raising_together():
            if local_batches:
                return distribute_local(batches, extended)
            return distribute(batches, extended, InputOptions())

    return [
        distributed(value) if are else value
        for value, are in zip(objects, are_batches, strict=True)
    ]


def _new_modules(strategy: AnyStrategy, objects: Sequence[Any]) -> list[Any]:
    """Return the modules in `objects` that are not mirrored yet.

    Raises: ValueError if an optimizer has parameters of neither a mirrored nor a given module, or none of the given
        modules' parameters.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    modules = [value for value in objects if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in objects if isinstance(value, torch.optim.Optimizer)]
    if not modules + optimizers:
        return []
    from mpistrat.pytorch.modules.preparing import check_optimizers, not_mirrored

    owner = strategy.extended.modules.get()
    check_optimizers(owner, optimizers, modules)
    return not_mirrored(owner, modules)


def _are_batches(value: Any, strategy: AnyStrategy) -> bool:
    """Whether `value` is an iterable to distribute. False for modules, optimizers and distributed datasets.

    Raises: TypeError if `value` cannot be prepared, ValueError if another strategy has distributed it.
    """
    if isinstance(value, DistributedDataset):
        if value.strategy is not strategy:
            raise ValueError(
                f"the dataset is distributed already, by {value.strategy}: give {strategy} the loader itself"
            )
        return False
    if _is_kept(value):
        return False
    if arrays.is_array(value):
        raise TypeError(
            f"prepare takes loaders, not one array, of shape {list(value.shape)}. For this replica's part of it, use "
            "strategy.shard(array); to make a parameter equal on all ranks, use strategy.mirror(parameter)"
        )
    if isinstance(value, (list, tuple)) and any(_is_kept(part) for part in value):
        raise TypeError(
            "prepare takes modules and optimizers as arguments of their own, not in a list: prepare(*modules)"
        )
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping)):
        return True
    raise TypeError(
        "prepare takes torch modules, optimizers, schedulers, and DataLoaders or other iterables of batches; got "
        f"{value!r:.60}"
    )


def _is_kept(value: Any) -> bool:
    """Whether `value` stays as it is: a torch module, or an object with `step` and `state_dict` like an optimizer."""
    makes_steps = hasattr(value, "step") and hasattr(value, "state_dict")
    return makes_steps or arrays.is_module(value)
