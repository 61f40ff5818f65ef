"""Distributed values: one component for each replica of this rank, and functions that build and split them."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import arrays, nest
from mpistrat.arrays import is_number
from mpistrat.context import current_local_replica, per_thread


class ReadsAsArray:
    """A value that NumPy and torch take as an array. A subclass implements `_read`, to return the array."""

    def _read(self) -> Any:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._read(), dtype=dtype)

    def _read_array(self) -> Any:
        array = arrays.as_array(self._read())
        if isinstance(array, np.generic):
            return np.asarray(array)
        return array

    def __dlpack__(self, **how: Any) -> Any:  # for torch.as_tensor, torch.tensor and from_dlpack
        array = self._read_array()
        try:
            return array.__dlpack__(**how)
        except TypeError:  # NumPy before 2.1 takes no max_version
            return array.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._read_array().__dlpack_device__()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return call_with_tensors(func, args, kwargs or {})


def call_with_tensors(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call torch's `func` with the arrays of distributed values in place of these values; return its result.

    Called by: torch, through `__torch_function__`, if an argument is a distributed value or a variable.
    Raises: TypeError if a distributed value holds an array of another library than torch, or if the function would
        write to a distributed value.
    """
    import torch

    # torch.compile traces this code, and does not know the names of torch's functions.
    name = "function" if torch.compiler.is_compiling() else getattr(func, "__name__", repr(func))

    def refuse(leaf: ReadsAsArray) -> None:
        raise TypeError(
            f"torch's {name} would write to {_named(leaf)}, on this replica alone; write to a tensor, and change a "
            "variable by its assign, assign_add or assign_sub"
        )

    def read(leaf: ReadsAsArray) -> Any:
        value = leaf._read()
        if arrays.is_array(value) and not arrays.is_torch(value):
            library = type(value).__module__.partition(".")[0]
            raise TypeError(
                f"torch's {name} takes tensors, and {_named(leaf)} holds an array of {library}, "
                f"{arrays.described(value)}: make it from a tensor, or pass torch.as_tensor of it to {name}"
            )
        return value

    _mapped(refuse, [kwargs.get("out"), *_written(name, args, kwargs)])
    tensors = [_mapped(read, argument) for argument in args]
    keywords = {key: _mapped(read, value) for key, value in kwargs.items()}
    return func(*tensors, **keywords)


# Functions that write to other arguments than the first: the keyword that makes them write, and their positions.
_WRITES_BY_KEYWORD = {
    "batch_norm": ("training", slice(1, 3)),
    "instance_norm": ("use_input_stats", slice(1, 3)),
    "embedding": ("max_norm", slice(1, 2)),
    "embedding_bag": ("max_norm", slice(1, 2)),
}


def _written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments, besides `out`, that torch's function `name` would overwrite; an empty sequence without any.

    These are the first argument of "add_" and of `inplace=True`, and running statistics and embedding weights.
    """
    is_in_place = name[-1:] == "_" and name[-2:] != "__"
    if is_in_place or kwargs.get("inplace"):
        return [*args, *kwargs.values()][:1]
    keyword, positions = _WRITES_BY_KEYWORD.get(name, ("", slice(0)))
    if not kwargs.get(keyword):
        return ()
    return [*args[positions], kwargs.get("running_mean"), kwargs.get("running_var")]


def _mapped(fn: Callable[[ReadsAsArray], Any], argument: Any) -> Any:
    """Return `argument` with `fn(value)` in place of each distributed value, also inside lists and tuples.

    The function does not use `nest.map_structure`, because torch.compile warns of the caches in `nest`.
    """
    if isinstance(argument, ReadsAsArray):
        return fn(argument)
    if isinstance(argument, (list, tuple)):
        children = [_mapped(fn, child) for child in argument]
        if any(new is not old for new, old in zip(children, argument, strict=True)):
            return nest.rebuild(argument, children)
    return argument


def _named(value: ReadsAsArray) -> str:
    name = getattr(value, "name", None)
    if name is None:
        return f"a {type(value).__name__}"
    return f"variable {name!r}"


def _divmod(value: Any, divisor: Any) -> Any:
    return value // divisor, value % divisor  # torch's tensors have no divmod


def _function(name: str) -> Any:
    return getattr(operator, f"__{name}__", _divmod)


def _forward(name: str) -> Any:
    function = _function(name)

    def forwarded(self: Any, *args: Any) -> Any:
        return function(self._operand(name), *args)

    return forwarded


def _reflect(name: str) -> Any:
    function = _function(name)

    def reflected(self: Any, other: Any) -> Any:
        return function(other, self._operand(name))

    return reflected


def _compare(name: str) -> Any:
    function = _function(name)

    def compared(self: Any, other: Any) -> Any:
        if other is None:
            return name == "ne"
        # A look-up in a WeakSet compares the value with itself, and needs a boolean.
        if other is self and "weakref" in sys._getframe(1).f_globals["__name__"]:
            return name == "eq"
        if isinstance(other, ActsAsArray):
            other = other._operand(name)
        return function(self._operand(name), other)

    return compared


_ARITHMETIC_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
BIT_OPERATORS = ("and", "or", "xor", "lshift", "rshift")
BINARY_OPERATORS = (*_ARITHMETIC_OPERATORS, *BIT_OPERATORS)
_OTHER_OPERATORS = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "getitem")


class ActsAsArray(ReadsAsArray):
    """A value that also has the operators and conversions of the array that it stands for.

    It has the hash of an object, so that sets find it by its identity. It is unequal to None.
    """

    __array_priority__ = 1000  # NumPy arrays leave `array + self` to our __radd__

    def _operand(self, name: str) -> Any:
        """Return the array for an operator or conversion, such as "add" or "float"."""
        return self._read()

    def __round__(self, digits: int | None = None) -> Any:
        value = arrays.as_array(self._operand("round"))
        if not digits:
            return value.round()
        return value.round(decimals=digits)  # torch rounds integers without `decimals` only

    def __format__(self, how: str) -> str:
        if not how:
            return str(self)
        return format(self._operand("format"), how)

    def __float__(self) -> float:
        return float(self._operand("float"))

    def __int__(self) -> int:
        return int(self._operand("int"))

    def __bool__(self) -> bool:
        return bool(self._operand("bool"))


# An operator that is set after the class is made does not take the hash away, as `def __eq__` in the class would.
for _name in ("eq", "ne"):
    setattr(ActsAsArray, f"__{_name}__", _compare(_name))
for _name in (*BINARY_OPERATORS, "divmod", *_OTHER_OPERATORS):
    setattr(ActsAsArray, f"__{_name}__", _forward(_name))
for _name in (*BINARY_OPERATORS, "divmod"):
    setattr(ActsAsArray, f"__r{_name}__", _reflect(_name))


class DistributedValues(ActsAsArray):
    """A value with a component on each replica of this rank.

    Inside `run` it stands for the array of the replica that uses it: NumPy and torch take it, and it has the operators
    of that array. Outside `run` they raise ValueError, and its operators raise TypeError.

    Example:
        >>> values = ms.DistributedValues([np.arange(2), np.arange(3)])
        >>> [component.shape for component in values.values]
        [(2,), (3,)]
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)
        if not self._values:
            raise ValueError(f"{type(self).__name__} needs at least one component")

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of this rank's replicas, in replica order."""
        return self._values

    def _read(self) -> Any:
        if per_thread.updated_replica is not None:
            return select_replica(per_thread.updated_replica, self)
        context = per_thread.modes[-1].replica_context if per_thread.modes else None
        if context is None:
            raise ValueError(
                f"a {type(self).__name__} has no single value outside run; use strategy.reduce, strategy.gather or "
                "strategy.experimental_local_results"
            )
        return context.own_component(self)

    def _operand(self, name: str) -> Any:
        try:
            return self._read()
        except ValueError as error:
            raise TypeError(str(error)) from None

    def __repr__(self) -> str:
        lines = [f"  {i}: {value!r}" for i, value in enumerate(self.values)]
        inside = ",\n".join(lines)
        return f"{type(self).__name__}:{{\n{inside}\n}}"


class PerReplica(DistributedValues):
    """A distributed value with different components on the replicas, so that it has no single value.

    `strategy.experimental_local_results` splits it into components; `strategy.reduce` and `strategy.gather` combine
    them. Inside `run`, NumPy and torch take it as the component of the replica that calls them.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> ids = strategy.run(lambda: np.array(ms.get_replica_context().replica_id_in_sync_group))
        >>> isinstance(ids, ms.PerReplica), strategy.experimental_local_results(ids)
        (True, (array(0), array(1)))
        >>> strategy.reduce("SUM", ids, axis=None)
        array(1)
    """


class Mirrored(DistributedValues):
    """A distributed value with equal components on all replicas. It acts as an array, inside and outside `run`.

    Inside `run` it stands for the replica's component, outside for the first component on this rank. Attributes and
    methods that `Mirrored` does not have are taken from that component.

    Example:
        >>> learning_rate = ms.Mirrored([np.float32(0.5), np.float32(0.5)])  # for two replicas
        >>> float(learning_rate), float(2 * learning_rate)
        (0.5, 1.0)
    """

    def _read(self) -> Any:
        return self._values[current_local_replica() or 0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._read(), name)


def by_owner(values: Sequence[Any], describe: Callable[[Any], str], owner: str = "replica") -> str:
    """Return a text of the values of all replicas, for messages: "replica 0: float32[2], replica 1: float32[3]".

    Args:
        describe: returns the text of one value.
        owner: the word for the owner of a value: "replica" or "rank".
    """
    texts = [f"{owner} {number}: {describe(value)}" for number, value in enumerate(values)]
    return ", ".join(texts)


def first_component(value: Any) -> Any:
    """Return the first replica's component of a distributed value, or a plain value itself."""
    if isinstance(value, DistributedValues):
        return value.values[0]
    return value


class PassedWhole:
    """Marks distributed values that `run` passes to every replica as a whole: variables."""


def select_replica(index: int, structure: Any) -> Any:
    """Return `structure` with the component `index` in place of each distributed value. Variables are kept as they are.

    Called by: `run`, for each replica's arguments.
    Args:
        index: number of a replica on this rank, from 0.
        structure: nested lists, tuples and mappings, or a single value.
    Raises: ValueError if a value has no such component.
    """
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
        return nest.map_structure(functools.partial(select_replica, index), structure)
    return structure


def regroup(
    values: Sequence[Any],
    always_wrap: bool = False,
    may_differ: bool = False,
) -> Any:
    """Combine the results of this rank's replicas into one structure of distributed values.

    The first replica's result gives the structure. If a leaf is the same object on all replicas, that object is the
    result. If its parts are the copies of a variable, the result is the variable. Other leaves become `PerReplica`.
    Python numbers always become `PerReplica`, because chance decides whether equal numbers are one object, and
    `reduce(SUM, n_correct)` must not depend on that.

    Called by: `run`, `merge_call`, and distributed datasets.
    Args:
        values: one result for each replica of this rank.
        always_wrap: whether each leaf but a variable becomes `PerReplica`, also with a single replica. If False, a
            single replica's result is returned as it is.
        may_differ: whether parts that differ in structure become `PerReplica` as a whole, and so does an object of a
            class of the program.
    Raises: AssertionError if the replicas' structures differ, and `may_differ` is False.
    """
    first = values[0]
    if len(values) == 1 and not always_wrap:
        return first
    if not nest.is_structure(first) or (may_differ and nest.is_of_program(first)):
        return _regrouped_leaf(values, always_wrap)
    children = [_children(value, first) for value in values]
    if None not in children:
        columns = zip(*children, strict=True)
        regrouped = [regroup(parts, always_wrap, may_differ) for parts in columns]
        return nest.rebuild(first, regrouped)
    if may_differ:
        return _regrouped_leaf(values, always_wrap)
    got = by_owner(values, nest.describe)
    raise AssertionError(
        f"all replicas must return the same structure (list, tuple, keys); got {got}"
    )


def _children(value: Any, first: Any) -> list[Any] | None:
    """Return the elements of `value`, a replica's list, tuple or mapping, in the order of the first replica's result.

    Returns: None if `value` has another kind, length or other keys than `first`.
    """
    if isinstance(first, Mapping):
        if isinstance(value, Mapping) and set(value) == set(first):
            return [value[key] for key in first]
        return None
    kind = list if isinstance(first, list) else tuple
    if isinstance(value, kind) and len(value) == len(first):
        return list(value)
    return None


def _regrouped_leaf(values: Sequence[Any], always_wrap: bool) -> Any:
    first = values[0]
    same = len({*map(id, values)}) == 1
    if same and isinstance(first, PassedWhole):
        return first
    if always_wrap:
        return PerReplica(values)
    if same and not is_number(first):
        return first
    container = getattr(first, "_container", None)
    return PerReplica(values) if container is None else container
