"""Datasets of `inputs.source`, in each form that the library takes them.

"arrays": a BatchedDataset; "loader": a torch DataLoader; "files": a FileDataset; "iterable": a plain iterable, which
says of itself what tf.data knows of the same chain of ops.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from conformance import encoding
from conformance.outcomes import CannotInterpret
from mpistrat import arrays, nest
from mpistrat.input import BatchedDataset, FileDataset
from mpistrat.input.batches import Batches, collate

Source = dict[str, Any]
INFINITE, UNKNOWN = -1, -2
# What leaves one example for each, or says how many it leaves.
_OF_EXAMPLES = ("map_add", "map_mul", "map_pair", "expand_row", "take", "skip", "shard", "repeat")


def forms(source: Source) -> tuple[tuple[encoding.Library, str], ...]:
    """The forms of `source`, each with its array library."""
    if source["kind"] == "text_files":
        return (("numpy", "files"),)
    dtypes = {*encoding.dtypes(source)}
    libraries = [
        library
        for library in encoding.LIBRARIES
        if all(encoding.has_dtype(library, dtype) for dtype in dtypes)
    ]
    found: list[tuple[encoding.Library, str]] = [(library, "iterable") for library in libraries]
    if _batched_examples(source) is not None:
        names = {"numpy": "arrays", "torch": "loader"}
        found += [(library, names[library]) for library in libraries]
    return tuple(found)


def dataset(source: Source, library: encoding.Library, form: str) -> Any:
    """What `inputs.source` describes."""
    if form == "files":
        return _files(source)
    if form == "iterable":
        return _chain(source, library)
    found = _batched_examples(source)
    assert found is not None
    before, size, drop = found
    if form == "arrays" and not before:
        whole = np.arange(source["n"]) if source["kind"] == "range" else _slices(source, library)
        return BatchedDataset(whole, size, drop_last=drop)
    examples = list(_chain({**source, "ops": before}, library))
    if form == "arrays":
        return BatchedDataset(_Examples(examples), size, drop_last=drop)
    return DataLoader(examples, size, drop_last=drop, collate_fn=collate)  # type: ignore[arg-type]


class _Examples:
    """A map-style dataset; a list would be taken for a nest of arrays."""

    def __init__(self, examples: list[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]


def _batched_examples(source: Source) -> tuple[list[Any], int, bool] | None:
    """The ops on examples, and the batch at their end, of a source that is no more than that."""
    ops = [op for op in source["ops"] if op[0] != "prefetch"]
    if not ops or ops[-1][0] != "batch" or ops[-1][1] < 1:
        return None
    before, (_, size, drop) = ops[:-1], ops[-1]
    if any(name not in _OF_EXAMPLES for name, *_ in before):
        return None
    return None if _chain({**source, "ops": before}).cardinality < 0 else (before, size, drop)


# Files


@functools.cache
def _folder() -> str:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _paths(source: Source) -> list[Path]:
    """The files of `source`, written; their names are in its order."""
    if source.get("reader") not in (None, "interleave"):
        raise CannotInterpret(f"reader {source['reader']!r}")
    folder = Path(tempfile.mkdtemp(dir=_folder()))
    written = [folder / f"{i:05}.txt" for i in range(len(source["files"]))]
    for path, texts in zip(written, source["files"], strict=True):
        path.write_text("".join(f"{text}\n" for text in texts))
    return written


def _files(source: Source) -> FileDataset:
    ops = [op for op in source.get("ops", []) if op[0] != "prefetch"]
    if len(ops) != 1 or ops[0][0] != "batch":
        raise CannotInterpret(f"ops {source.get('ops')!r} of files")
    (_, size, drop) = ops[0]
    return FileDataset(_paths(source), _lines, size, drop_last=drop)


# Chains of ops


@dataclass(frozen=True)
class Chain:
    """An iterable of `make()`, with what tf.data knows of it.

    Attributes:
        shapes: of each array of an element, None where a size varies.
        last_batch: the batch size that is found by walking back over the ops.
    """

    make: Callable[[], Iterator[Any]]
    cardinality: int
    shapes: tuple[tuple[int | None, ...], ...]
    last_batch: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.make()

    @property
    def batch_size(self) -> int | None:
        """The first size of all arrays, where that never varies; else that of the last batch op."""
        if () in self.shapes:
            return None
        firsts = {shape[0] for shape in self.shapes}
        only = firsts.pop() if len(firsts) == 1 else None
        return self.last_batch if only is None else only

    @property
    def drop_last(self) -> bool:
        """Whether all batches are alike."""
        return all(shape and None not in shape for shape in self.shapes)


def _chain(source: Source, library: encoding.Library = "numpy") -> Chain:
    made = _start(source, library)
    for name, *args in source["ops"]:
        if name not in _OPS:
            raise CannotInterpret(f"op {name!r} of a dataset")
        made = _OPS[name](made, *args)
    return made


def _slices(source: Source, library: encoding.Library) -> Any:
    """The arrays of tensor_slices: one, or a mapping of names to them."""
    data = source["data"]
    if encoding.is_array(data):
        return encoding.decode(data, library)
    if not all(encoding.is_array(part) for part in data.values()):
        return encoding.decode(data, library)
    return {name: encoding.decode(part, library) for name, part in data.items()}


def _start(source: Source, library: encoding.Library) -> Chain:
    if source["kind"] == "range":
        numbers = range(source["n"])
        return Chain(
            lambda: (encoding.array(library, i, "int64") for i in numbers), len(numbers), ((),)
        )
    if source["kind"] == "tensor_slices":
        whole = _slices(source, library)
        size = Batches().size(whole)
        shapes = tuple(tuple(leaf.shape[1:]) for leaf in nest.flatten(whole))
        return Chain(lambda: (_at(whole, i) for i in range(size)), size, shapes)
    raise CannotInterpret(f"source {source['kind']!r}")


def _at(structure: Any, index: int) -> Any:
    return nest.map_structure(
        lambda leaf: leaf[index] if arrays.is_torch(leaf) else np.asarray(leaf[index]), structure
    )


def _batch(before: Chain, size: int, drop: bool) -> Chain:
    def make() -> Iterator[Any]:
        elements = iter(before)
        while examples := list(itertools.islice(elements, size)):
            if drop and len(examples) < size:
                return
            yield collate(examples)

    count = before.cardinality
    count = count if count < 0 else count // size if drop else -(-count // size)
    shapes = tuple((size if drop else None, *shape) for shape in before.shapes)
    return Chain(make, count, shapes, size)


def _unbatch(before: Chain) -> Chain:
    def make() -> Iterator[Any]:
        return (_at(batch, i) for batch in before for i in range(Batches().size(batch)))

    firsts = {shape[:1] for shape in before.shapes}
    first = firsts.pop() if len(firsts) == 1 else (None,)
    size = first[0] if first else None
    count = before.cardinality
    count = count if count == INFINITE else UNKNOWN if size is None or count < 0 else count * size
    return Chain(make, count, tuple(shape[1:] for shape in before.shapes))


def _repeat(before: Chain, times: int = -1) -> Chain:
    def make() -> Iterator[Any]:
        for _ in itertools.count() if times < 0 else range(times):
            some = False
            for element in before:
                some = True
                yield element
            if not some:
                return

    count = before.cardinality
    if times >= 0:
        count = 0 if times == 0 else count if count < 0 else count * times
    elif count > 0:
        count = INFINITE
    return replace(before, make=make, cardinality=count)


def _take(before: Chain, number: int) -> Chain:
    count = before.cardinality
    if number < 0:
        return before
    count = number if count == INFINITE else count if count < 0 else min(count, number)
    return replace(before, make=lambda: itertools.islice(before, number), cardinality=count)


def _skip(before: Chain, number: int) -> Chain:
    count = before.cardinality
    count = 0 if number < 0 else count if count < 0 else max(0, count - number)
    if number < 0:
        return replace(before, make=lambda: iter(()), cardinality=count)
    return replace(before, make=lambda: itertools.islice(before, number, None), cardinality=count)


def _shard(before: Chain, number: int, index: int) -> Chain:
    count = before.cardinality
    count = count if count < 0 else len(range(index, count, number))
    return replace(
        before, make=lambda: itertools.islice(before, index, None, number), cardinality=count
    )


def _map(
    before: Chain,
    function: Callable[[Any], Any],
    shapes: tuple[tuple[int | None, ...], ...] | None = None,
) -> Chain:
    """After a map, no batch op is found any more."""
    shapes = before.shapes if shapes is None else shapes
    return Chain(lambda: map(function, before), before.cardinality, shapes)


def _map_mul(before: Chain, factor: int) -> Chain:
    return _map(before, lambda x: nest.map_structure(lambda a: a * factor, x))


def _map_add(before: Chain, number: int) -> Chain:
    return _map(before, lambda x: nest.map_structure(lambda a: a + number, x))


def _map_pair(before: Chain) -> Chain:
    return _map(before, lambda x: (x, {"y": x * 10}), before.shapes * 2)


def _expand_row(before: Chain) -> Chain:
    def expanded(x: Any) -> Any:
        return torch.stack([x, x + 100]) if arrays.is_torch(x) else np.stack([x, x + 100])

    return _map(before, expanded, tuple((2, *shape) for shape in before.shapes))


def _filter_even(before: Chain) -> Chain:
    return Chain(lambda: (x for x in before if x % 2 == 0), UNKNOWN, before.shapes)


_OPS: dict[str, Callable[..., Chain]] = {
    "batch": _batch,
    "unbatch": _unbatch,
    "repeat": _repeat,
    "take": _take,
    "skip": _skip,
    "shard": _shard,
    "map_add": _map_add,  # not a recorded one: it tells workers' numbers apart
    "map_mul": _map_mul,
    "map_pair": _map_pair,
    "expand_row": _expand_row,
    "filter_even": _filter_even,
    "prefetch": lambda before, buffered=1: before,
}
