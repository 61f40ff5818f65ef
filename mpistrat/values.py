"""Distributed values: one component for each replica of this rank, and how they are made and taken apart."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import nest
from mpistrat.arrays import is_number
from mpistrat.context import current_local_replica


class DistributedValues:
    """A value with a component on each replica of this rank.

    Attributes:
        values: the components, in replica order.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise ValueError(f"{type(self).__name__} needs at least one component")

    @property
    def values(self) -> tuple[Any, ...]:
        return self._values

    def __repr__(self) -> str:
        inside = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{inside}\n}}"


class PerReplica(DistributedValues):
    """Components that differ from replica to replica; together they have no single value.

    Take them apart with `strategy.experimental_local_results`, or combine them with
    `strategy.reduce` or `strategy.gather`. Inside `run` it converts to its replica's component.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        replica = current_local_replica()
        if replica is None:
            raise ValueError(
                "a PerReplica has no single value outside run; use strategy.reduce, strategy.gather or "
                "strategy.experimental_local_results"
            )
        return np.asarray(self._values[replica], dtype=dtype)


def _forward(name: str) -> Any:
    function = getattr(operator, name, None) or {"__divmod__": divmod}[name]

    def forwarded(self: Any, *args: Any) -> Any:
        return function(self._read(), *args)

    return forwarded


def _reflect(name: str) -> Any:
    function = getattr(operator, name)

    def reflected(self: Any, other: Any) -> Any:
        return function(other, self._read())

    return reflected


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("neg", "pos", "abs", "lt", "le", "gt", "ge", "getitem")


class ActsAsArray:
    """Operators and conversions of a subclass that says what it reads as, in `_read`."""

    __array_priority__ = 1000  # NumPy arrays leave `array + self` to our __radd__

    def _read(self) -> Any:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._read(), dtype=dtype)

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())


for _name in (*_BINARY, *_OTHERS):
    setattr(ActsAsArray, f"__{_name}__", _forward(f"__{_name}__"))
for _name in _BINARY:
    setattr(ActsAsArray, f"__r{_name}__", _reflect(f"__{_name}__"))


class Mirrored(ActsAsArray, DistributedValues):
    """Components that are equal on every replica; it stands for any of them."""

    def _read(self) -> Any:
        return self._values[current_local_replica() or 0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)


class PassedWhole:
    """Marks distributed values that `run` hands to every replica whole: variables."""


def select_replica(index: int, structure: Any) -> Any:
    """`structure` with every distributed value replaced by the component of local replica `index`."""
    if isinstance(structure, DistributedValues):
        if isinstance(structure, PassedWhole):
            return structure
        try:
            return structure.values[index]
        except IndexError:
            raise ValueError(
                f"a {type(structure).__name__} of {len(structure.values)} components was passed to more "
                f"replicas (replica {index} of this rank has none); was it made by another strategy?"
            ) from None
    if nest.is_structure(structure):
        return nest.map_structure(lambda leaf: select_replica(index, leaf), structure)
    return structure


def regroup(values: Sequence[Any], always_wrap: bool = False, wrap_numbers: bool = True) -> Any:
    """Combine what the replicas of this rank returned into one structure of distributed values.

    The first replica's structure drives; the others must match it (AssertionError). A leaf that is
    the same object on all replicas stays itself, others become `PerReplica`.

    Args:
        values: one result per replica.
        always_wrap: wrap every leaf, also for a single replica.
        wrap_numbers: wrap Python numbers even if they are the same object. Whether two equal ones
            are is chance, and what `reduce(SUM, n_correct)` gives must not depend on it.
    """
    first = values[0]
    if len(values) == 1 and not always_wrap:
        return first
    if isinstance(first, (list, tuple)):
        kind = list if isinstance(first, list) else tuple
        for other in values[1:]:
            if not isinstance(other, kind) or len(other) != len(first):
                raise AssertionError(_structures_differ(values))
        return nest.rebuild(
            first,
            [regroup(parts, always_wrap, wrap_numbers) for parts in zip(*values, strict=True)],
        )
    if isinstance(first, Mapping):
        for other in values[1:]:
            if not isinstance(other, Mapping) or set(other) != set(first):
                raise AssertionError(_structures_differ(values))
        return nest.rebuild(
            first, [regroup([v[k] for v in values], always_wrap, wrap_numbers) for k in first]
        )
    same = all(other is first for other in values)
    if same and isinstance(first, PassedWhole):
        return first
    if same and not always_wrap and not (wrap_numbers and is_number(first)):
        return first
    container = getattr(first, "_container", None)
    if container is not None and not always_wrap:
        return container
    return PerReplica(values)


def _structures_differ(values: Sequence[Any]) -> str:
    described = ", ".join(f"replica {i}: {nest.describe(value)}" for i, value in enumerate(values))
    return f"all replicas must return the same structure (list, tuple, keys); got {described}"
