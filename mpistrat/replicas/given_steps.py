"""How many examples the step has that a program computes with: what weighs a replica's loss."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


@dataclass
class _LastStep:
    """The last step of an iterator.

    Attributes:
        at: after how many backwards it was given.
        totals: examples over all replicas; with those of the steps before it, if the program reads ahead.
        is_only: the iterator has given no other, and has not ended.
    """

    iterator: weakref.ref[Any]
    examples: StepExamples | None
    at: int
    totals: set[int]
    reads_ahead: bool = False
    is_only: bool = True


class GivenSteps:
    """The steps that iterators over distributed datasets have given on this rank.

    The program computes with the last step of the iterators that it still holds. So after an evaluation in mid-epoch it
    is the step from before. A step from `next(iter(loader))` counts although its iterator is gone.

    Attributes:
        examples: of that step; None if that is not known.
        shards: what `Strategy.shard` has cut since the last backward, where that is not such a step: the size of the
            part, that of the whole, and the dimension. On the first rank alone.
        blocks: how many threads are inside `Strategy.replica()`; steps that other threads are given are not theirs.
    """

    def __init__(self, num_replicas: int, is_first_rank: bool) -> None:
        self._num_replicas, self._is_first_rank = num_replicas, is_first_rank
        self.examples: StepExamples | None = None
        self.shards: set[tuple[int, int, int]] = set()
        self.blocks = 0
        self._last_steps: list[_LastStep] = []
        self._backwards = 0
        self._has_warned = self._has_told = False

    def give(self, iterator: Any, examples: StepExamples | None) -> None:
        """`iterator` gives a step with these examples."""
        before = next((last for last in self._last_steps if last.iterator() is iterator), None)
        totals = set() if examples is None else {int(examples[-1])}
        last = _LastStep(weakref.ref(iterator, self._forget), examples, self._backwards, totals)
        if before is not None:
            self._last_steps.remove(before)
            last.is_only = False
            last.reads_ahead = before.reads_ahead or before.at == self._backwards
            if last.reads_ahead:
                last.totals |= before.totals
        self._last_steps.append(last)
        self.examples = examples

    def end(self, iterator: Any) -> None:
        """`iterator` has no more."""
        for last in self._last_steps:
            last.is_only &= last.iterator() is not iterator

    def _forget(self, iterator: weakref.ref[Any]) -> None:
        gone = self._last_steps[-1] if self._last_steps[-1].iterator is iterator else None
        self._last_steps = [last for last in self._last_steps if last.iterator is not iterator]
        if self._last_steps:
            self.examples = self._last_steps[-1].examples
        elif gone is None or not gone.is_only:
            self.examples = None

    def count_backward(self) -> None:
        """A backward weighs its loss by `examples`. Warns once where they may be those of another step."""
        if self._last_steps and not self._has_warned:
            since = [last.totals for last in self._last_steps[:-1] if last.at == self._backwards]
            totals = self._last_steps[-1].totals.union(*since)
            if len(totals) > 1 and any(total % self._num_replicas for total in totals):
                self._has_warned = True
                if self._is_first_rank:
                    tell(
                        f"backward() inside replica(): loaders gave steps of {sorted(totals)} examples before it, "
                        f"not all of which divide by {self._num_replicas} replicas, and a replica's gradient counts "
                        "by its part of the last one. Call backward() before the next step is asked for; or use "
                        "drop_last=True; or scale the loss with compute_average_loss(…, global_batch_size=…)"
                    )
        self._backwards += 1

    def combine_shards(self, *, alike: bool) -> None:
        """A backward combines the gradients of all parts.

        Args: alike: parts count alike where no loader's step weighs them.
        """
        if alike and self.examples is None:
            self.tell_of_uneven_shards()
        self.shards.clear()

    def tell_of_uneven_shards(self, own: int | None = None) -> None:
        """Parts count alike, all or those of `own` examples: the first rank says so where their sizes differ."""
        for part, size, dim in self.shards:
            if size % self._num_replicas and own in (None, part):
                _tell_of_rest(size, dim, self._num_replicas)
        self.shards.clear()

    def check_size(self, own: int, size: int) -> None:
        """The losses of `own` examples are divided by `size`, and gradients are summed: tell where these get too large.

        There `size` is that of a part, and not that of the step or shard which the part is of. All other sizes are the
        program's own business: it accumulates, or scales by the step of another loader. Tells once.
        """
        totals = {whole for part, whole, _ in self.shards if part == own}
        *parts, total = [0, 0] if self.examples is None else map(int, self.examples)
        totals |= {total for part in parts if total and part == own}
        is_known = any(s.examples is not None and s.examples[-1] == size for s in self._last_steps)
        if len(totals) == 1 and self._is_first_rank and not is_known:
            (total,) = totals
            if size == own * self._num_replicas:
                self.tell_of_uneven_shards(own)
            elif size in (own, sum(parts), total / self._num_replicas) and not self._has_told:
                self._has_told = True
                tell(
                    f"compute_average_loss: global_batch_size={size} is the size of one part; the batch has {total} "
                    f"examples over all {self._num_replicas} replicas. Gradients, which are summed over replicas, are "
                    f"{total / size:.3g} times as large as those of the mean: pass global_batch_size={total}"
                )
        self.shards.clear()


@functools.lru_cache(1024)
def _tell_of_rest(size: int, dim: int, num_replicas: int) -> None:
    """Once for each size: a loader says how large the parts of its batches are, and `shard` does not."""
    tell(
        f"shard: dimension {dim}, of size {size}, does not divide by {num_replicas} replicas. A mean over a part "
        "gives what is in short parts more weight; choose a size that divides, or scale the loss with "
        "compute_average_loss(per_example_loss, global_batch_size=...)"
    )
