"""Records the steps that loaders have given, and the arrays that were sharded. Losses are averaged by their sizes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


@dataclass(eq=False)
class _Iteration:
    """Records the steps that one iterator over a distributed dataset has given.

    A step "with gradients" was given while torch's gradients were on, and its number of examples is known.

    Attributes:
        iterator: a weak reference to the iterator.
        examples: numbers of examples of the iterator's last step; None if not known.
        training: numbers of examples of the last step that was given while gradients were on; None if not known.
        order: number of that step, counted over all iterators from 1; 0 if there is none.
        sizes: the sizes of all steps with gradients; a size is the number of examples over all replicas.
        recent: the sizes of the steps with gradients since the last backward.
        since: number of steps with gradients since the last backward.
        ahead: number of steps with gradients before the first backward, minus one; None until that backward.
        is_only: whether the iterator has given one step only, and has not ended.
        has_ended: whether the iterator has given its last step.
    """

    iterator: weakref.ref[Any]
    examples: StepExamples | None = None
    training: StepExamples | None = None
    order: int = 0
    sizes: set[int] = field(default_factory=set)
    recent: set[int] = field(default_factory=set)
    since: int = 0
    ahead: int | None = None
    is_only: bool = True
    has_ended: bool = False

    @property
    def reads_ahead(self) -> bool:
        """Whether several steps came before the first backward, and a step's parts may differ in size.

        False if the iterator is gone.
        """
        return bool(self.ahead) and not getattr(self.iterator(), "divides", True)

    @property
    def is_evaluation(self) -> bool:
        """Whether the iterator has ended, and no backward came from its first step to its end."""
        return self.has_ended and self.ahead is None

    def take_sizes(self) -> set[int]:
        """Begin a backward, and return the sizes of the steps that its loss may come from.

        Returns: the sizes since the last backward, and forgets them; after the iterator's end, if no step came since
            the last backward, the sizes of all its steps.
        """
        if self.since:
            if self.ahead is None:
                self.ahead = self.since - 1
        elif self.has_ended:  # the program has read all steps ahead
            return self.sizes
        recent = self.recent
        self.recent = set()
        self.since = 0
        return recent


class GivenSteps:
    """The steps that iterators over distributed datasets have given on this rank.

    A loss is taken to come from the last step of an iterator that the program still holds. So after an evaluation in
    mid-epoch, a loss comes from the training step before the evaluation. A step from `next(iter(loader))` counts
    although its iterator is gone.

    "Numbers of examples" are a `StepExamples`: int64 [this rank's replicas + 1], with the sum over all ranks last.

    Attributes:
        examples: numbers of examples of the step that was given last; None if not known.
        examples_with_gradients: numbers of examples of the last step that was given while gradients were on; if there
            is none, the value of `examples`.
        iterations: a record for each iterator with a step that the program may compute with, the last to give a step
            last.
        blocks: number of threads inside `Strategy.replica()`. While it is not 0, steps that other threads get are not
            counted.
        distributed: whether a distributed dataset has given a step, or values were distributed or sharded.
    """

    def __init__(self, num_replicas: int, num_ranks: int, is_first_rank: bool) -> None:
        self._num_replicas = num_replicas
        self._num_ranks = num_ranks
        self._is_first_rank = is_first_rank
        self.blocks = 0
        self.distributed = False
        self.examples: StepExamples | None = None  # not a property: compiled losses read it
        self.examples_with_gradients: StepExamples | None = None
        self.iterations: list[_Iteration] = []
        self._last: _Iteration | None = None  # the last to give a step while gradients were on
        self._order = 0
        self._shard_is_last = False  # whether arrays were sharded after the last step
        # Whether a step without gradients, or of an iterator that is gone, had parts of different sizes.
        self._left_uneven = False
        self._said: set[str] = set()

    def give(self, iterator: Any, examples: StepExamples | None, *, gradients: bool) -> None:
        """Record that `iterator` gives a step. Called by: the iterator's `next`, on every rank.

        Args:
            examples: numbers of examples of the step; None if not known.
            gradients: whether gradients are on.
        """
        self.distributed = True
        iteration = None
        kept = []
        for known in self.iterations:
            owner = known.iterator()
            if owner is iterator:
                iteration = known
                iteration.is_only = False
            elif owner is not None and not (gradients and known.is_evaluation):
                kept.append(known)
        iteration = iteration or _Iteration(weakref.ref(iterator, self._forget))
        iteration.examples = examples
        if gradients:
            self._order += 1
            self._shard_is_last = False
            iteration.training = examples
            iteration.order = self._order
            if examples is not None:
                size = int(examples[-1])
                iteration.since += 1
                iteration.recent.add(size)
                iteration.sizes.add(size)
        elif examples is not None:
            self._left_uneven |= bool(examples[-1] % self._num_replicas)
        self._keep([*kept, iteration])

    def shard(self) -> None:
        """Record that `Strategy.shard` has cut arrays that are not an iterator's step.

        Until an iterator gives the next step with gradients on, `begin_backward` takes the loss to come from them.
        """
        self._shard_is_last = True
        self._keep([i for i in self.iterations if not i.is_evaluation])

    def _keep(self, iterations: list[_Iteration]) -> None:
        for left in {*self.iterations}.difference(iterations):
            self._left_uneven |= self._is_uneven(left.sizes)
        self.iterations = iterations
        last = None
        order = 0
        for iteration in iterations:
            if iteration.order > order:
                last = iteration
                order = last.order
        self._last = last
        self.examples = iterations[-1].examples if iterations else None
        self.examples_with_gradients = self.examples if last is None else last.training

    def end(self, iterator: Any) -> None:
        """Record that `iterator` has ended.

        If no backward came since its first step, its steps were an evaluation. They are then forgotten, if another
        iterator has given steps while gradients were on.
        """
        for iteration in self.iterations:
            if iteration.iterator() is iterator:
                iteration.is_only = False
                iteration.has_ended = True
                kept = [i for i in self.iterations if i is not iteration]
                if iteration.is_evaluation and any(i.order for i in kept):
                    self._keep(kept)

    def _forget(self, iterator: weakref.ref[Any]) -> None:
        last = self.iterations[-1]
        if last.is_only and last.iterator is iterator:
            return  # a step from `next(iter(loader))` counts longer than its iterator lives
        self._keep([i for i in self.iterations if i.iterator is not iterator])

    def begin_backward(self, *, weighs: bool) -> StepExamples | None:
        """Begin a backward, and return the numbers of examples by which the replicas' losses count.

        Called by: the gradient reducer in each `backward()`, if `weighs`, or if `iterations` is not empty.
        Args:
            weighs: whether losses count by examples: True inside `replica()`, if gradients are averaged.
        Returns: the numbers of the last step that was given while gradients were on; None if all replicas count alike:
            `weighs` is False, the loss comes from sharded arrays, or the step's numbers are not known.
        Raises:
            RuntimeError: on all ranks, if `weighs`, and steps of several sizes came before the backward, not all of
                them divisible by the number of replicas.
        """
        last = self._last
        is_of_shard = self._shard_is_last
        current = []
        sizes: set[int] = set()
        for iteration in self.iterations:
            if iteration.since or iteration is last:
                is_of_shard &= not iteration.since
                current.append(iteration)
                sizes |= iteration.take_sizes()
        if not weighs or is_of_shard:
            return None
        if self._are_of_unequal_weight(sizes):
            raise RuntimeError(
                f"backward() inside replica(): loaders gave steps of {sorted(sizes)} examples before it, not all of "
                f"which divide by {self._num_replicas} replicas. The strategy does not know by which step gradients "
                "count. Evaluate inside torch.no_grad(), and ask for the next step after backward(); or use "
                "drop_last=True, or scale the loss with compute_average_loss(…, global_batch_size=…)"
            )
        self._tell_of_other_sizes(current)
        return None if last is None else last.training

    def check_sizes(self) -> None:
        """Check that a loss of unknown size can come from the last step alone.

        Called by: `compute_average_loss` without `global_batch_size`, for a loss with gradients.
        Raises: ValueError, on all ranks, if several iterators gave steps since the last backward, with different
            numbers of examples, not all of them divisible by the number of replicas.
        """
        sizes = {
            int(iteration.training[-1])
            for iteration in self.iterations
            if iteration.since and iteration.training is not None
        }
        if self._are_of_unequal_weight(sizes):
            raise ValueError(
                f"compute_average_loss without global_batch_size: loaders gave steps of {sorted(sizes)} examples, not "
                f"all of which divide by {self._num_replicas} replicas, and the loss may come from any of them. Pass "
                "global_batch_size=…, on all ranks"
            )

    def _are_of_unequal_weight(self, sizes: set[int]) -> bool:
        """Whether there are steps of several sizes, and the examples of some of them count unequally."""
        return len(sizes) > 1 and self._is_uneven(sizes)

    def _is_uneven(self, sizes: set[int]) -> bool:
        """Whether a step of one of these sizes has parts of different sizes."""
        rests = {size % self._num_replicas for size in sizes}
        return not rests <= {0}

    def _tell_of_other_sizes(self, current: list[_Iteration]) -> None:
        """Let rank 0 warn that the loss may come from another step than the last step of the iterators in `current`."""
        if any(iteration.reads_ahead for iteration in current):
            self.tell_once(
                "backward() inside replica(): a loader gave several steps before the first backward(). Gradients are "
                "weighted by the last step, and are wrong for an earlier step of another size. Call backward() before "
                f"you ask for the next step, or use drop_last=True (with a batch size that {self._num_replicas} "
                "divides), or scale the loss with compute_average_loss(…, global_batch_size=…)"
            )
        if self._last is None and self._left_uneven:
            self.tell_once(
                "backward() inside replica(): all replicas' gradients count alike, though a loader gave parts of "
                "different sizes, inside torch.no_grad() or in an iteration that is over. If the loss is of such a "
                "step, scale it with compute_average_loss(…, global_batch_size=…)"
            )

    def reduced(self) -> None:
        """Record that the ranks have combined gradients. Rank 0 warns, once, if `distributed` is False.

        The warning is about ranks that may all read the same data. `distributed` is True afterwards.
        """
        if self._num_ranks > 1 and not self.distributed:
            self.distributed = True
            self.tell_once(
                f"backward() has combined the gradients of {self._num_ranks} ranks, though no loader was distributed "
                "and no batch was sharded. If all ranks read the same data, each example counts "
                f"{self._num_ranks} times: use strategy.prepare(loader) or strategy.shard(batch). If each rank makes "
                "its own data, as in reinforcement learning, do nothing"
            )

    def has_given(self, size: int) -> bool:
        """Whether the last step of any of the iterators has `size` examples over all replicas."""
        return any(i.examples is not None and i.examples[-1] == size for i in self.iterations)

    def tell_once(self, text: str) -> None:
        """Let rank 0 say `text`, once for each text."""
        if self._is_first_rank and text not in self._said:
            tell(text)
        self._said.add(text)


class ShardedArrays:
    """Records the arrays that `Strategy.shard` has cut on this rank, to warn of parts with wrong weights in the loss.

    The size of a part does not say how large the whole array is.

    Args:
        tell_once: lets rank 0 print a text, once.

    Attributes:
        count: number of calls of `shard` inside `replica()` while gradients were on.
        first: checksum of the arrays of the first of these calls; 0 once the ranks have compared it.
        cuts: (size of this replica's part, size of the whole, dimension) of each array that was cut since the last
            backward, while gradients were on. Arrays as long as a loader's step are left out.
    """

    def __init__(self, num_replicas: int, tell_once: Callable[[str], None]) -> None:
        self._num_replicas = num_replicas
        self._tell_once = tell_once
        self.count = self.first = 0
        self.cuts: set[tuple[int, int, int]] = set()

    def compared(self, *, same: bool) -> None:
        """Record that the ranks have compared `first`, as they do in a reduction of gradients.

        Args: same: whether `first` was equal on all ranks. If False, rank 0 warns, once, of different arrays.
        """
        self.first = 0
        if not same:
            self._tell_once(
                "shard: the ranks have given it different arrays, and each rank has taken a part of its own array. If "
                "the arrays are random numbers, seed them alike on every rank (torch.manual_seed). If each rank is to "
                "have data of its own, leave shard out"
            )

    def combine(self, *, alike: bool) -> None:
        """Record that a backward combines the gradients of all parts, and forget the cuts.

        Args: alike: whether all replicas' losses get equal weights, whatever the sizes of their parts. If so, rank 0
            warns of parts of different sizes.
        """
        if alike:
            self.tell_of_uneven()
        self.cuts.clear()

    def tell_of_uneven(self, part: int | None = None) -> None:
        """Let rank 0 warn, once, if the replicas' parts of a cut array differ in size.

        Callers know that all replicas' losses get equal weights, so examples in smaller parts weigh more.
        Args: part: look only at cuts that gave this replica a part of this size; None: at all `cuts`.
        """
        for length, size, dim in self.cuts:
            if size % self._num_replicas and part in (None, length):
                self._tell_once(
                    f"shard: dimension {dim}, of size {size}, does not divide by {self._num_replicas} replicas. A mean "
                    "over a part gives the examples of short parts more weight; choose a size that divides, or scale "
                    "the loss with compute_average_loss(per_example_loss, global_batch_size=...)"
                )
