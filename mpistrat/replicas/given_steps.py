"""The numbers of examples of the steps that a program computes with, by which losses are averaged."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


@dataclass(eq=False)
class _Iteration:
    """The steps of an iterator.

    Attributes:
        examples: of its last step.
        training: of its last step that was given while gradients were on; None if that is not known.
        order: grows with each step that any iterator gives while gradients are on; that of the last such step.
        sizes: examples over all replicas, of such steps.
        recent: those of the steps that came since the last backward.
        since: how many such steps.
        ahead: how many of them, beside one, came before the first backward; None before that backward.
        is_only: it has given no other step, and has not ended.
        has_ended: it has no more.
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
        """Several steps came before the first backward, and parts of a step may have different sizes."""
        return bool(self.ahead) and not getattr(self.iterator(), "divides", True)

    @property
    def is_evaluation(self) -> bool:
        """No backward came from its first step to its end."""
        return self.has_ended and self.ahead is None

    def take_sizes(self) -> set[int]:
        """A backward begins. Returns: the sizes of the steps that its loss may be of."""
        if self.since:
            self.ahead = self.since - 1 if self.ahead is None else self.ahead
        elif self.has_ended:  # a program that has read ahead
            return self.sizes
        recent, self.recent, self.since = self.recent, set(), 0
        return recent


class GivenSteps:
    """The steps that iterators over distributed datasets have given on this rank.

    The program computes with the last step of the iterators that it still holds. So after an evaluation in mid-epoch
    it computes with the step from before. A step from `next(iter(loader))` counts although its iterator is gone.

    Attributes:
        examples: of the step that was given last; None if that is not known.
        examples_with_gradients: as `examples`, but of the last step that was given while gradients were on, if there is
            any.
        iterations: those whose steps the program may compute with.
        blocks: how many threads are inside `Strategy.replica()`; steps that other threads are given are not theirs.
        distributed: a distributed dataset has given a step, or values were distributed or sharded.
    """

    def __init__(self, num_replicas: int, num_ranks: int, is_first_rank: bool) -> None:
        self._num_replicas, self._num_ranks = num_replicas, num_ranks
        self._is_first_rank = is_first_rank
        self.blocks = 0
        self.distributed = False
        self.examples: StepExamples | None = None  # no property: compiled losses read it
        self.examples_with_gradients: StepExamples | None = None
        self.iterations: list[_Iteration] = []
        self._last: _Iteration | None = None  # that gave a step while gradients were on
        self._order = 0
        self._shard_is_last = False  # after the steps of iterators
        # Parts of different sizes were given in steps that weigh no backward.
        self._left_uneven = False
        self._said: set[str] = set()

    def give(self, iterator: Any, examples: StepExamples | None, *, gradients: bool) -> None:
        """`iterator` gives a step with these examples. Args: gradients: whether they are on."""
        self.distributed = True
        iteration, kept = None, []
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
            iteration.training, iteration.order = examples, self._order
            if examples is not None:
                iteration.since += 1
                iteration.recent.add(int(examples[-1]))
                iteration.sizes.add(int(examples[-1]))
        elif examples is not None:
            self._left_uneven |= bool(examples[-1] % self._num_replicas)
        self._keep([*kept, iteration])

    def shard(self) -> None:
        """Arrays are sharded that are no step of an iterator. What comes next may be of them."""
        self._shard_is_last = True
        self._keep([i for i in self.iterations if not i.is_evaluation])

    def _keep(self, iterations: list[_Iteration]) -> None:
        for left in {*self.iterations}.difference(iterations):
            self._left_uneven |= self._is_uneven(left.sizes)
        self.iterations = iterations
        order = operator.attrgetter("order")
        self._last = last = max(filter(order, iterations), key=order, default=None)
        self.examples = iterations[-1].examples if iterations else None
        self.examples_with_gradients = self.examples if last is None else last.training

    def end(self, iterator: Any) -> None:
        """`iterator` has no more. If no backward came since its first step, its steps were those of an evaluation."""
        for iteration in self.iterations:
            if iteration.iterator() is iterator:
                iteration.is_only, iteration.has_ended = False, True
                kept = [i for i in self.iterations if i is not iteration]
                if iteration.is_evaluation and any(i.order for i in kept):
                    self._keep(kept)

    def _forget(self, iterator: weakref.ref[Any]) -> None:
        last = self.iterations[-1]
        stays = last.is_only and last.iterator is iterator
        self._keep([i for i in self.iterations if i.iterator is not iterator or stays])

    def begin_backward(self, *, weighs: bool) -> StepExamples | None:
        """A backward begins. Returns: the examples of the step by which a replica's loss counts; None: all count alike.

        Args:
            weighs: whether they count by examples.
        Raises:
            RuntimeError: they do, and it is not known by which step. All ranks raise it.
        """
        last, is_of_shard, current, sizes = self._last, self._shard_is_last, [], set[int]()
        for iteration in self.iterations:
            if iteration.since or iteration is last:
                is_of_shard &= not iteration.since
                current.append(iteration)
                sizes |= iteration.take_sizes()
        if not weighs or is_of_shard:
            return None
        if len(sizes) > 1 and self._is_uneven(sizes):
            raise RuntimeError(
                f"backward() inside replica(): loaders gave steps of {sorted(sizes)} examples before it, not all of "
                f"which divide by {self._num_replicas} replicas, and a replica's gradient counts by its part of one "
                "step: the strategy does not know which. Ask inside torch.no_grad() for a step that is only looked at "
                "or evaluated. Else call backward() before the next step is asked for; or use drop_last=True; or scale "
                "the loss with compute_average_loss(…, global_batch_size=…)"
            )
        self._tell_of_other_sizes(current)
        return None if last is None else last.training

    def _is_uneven(self, sizes: set[int]) -> bool:
        """Whether parts of steps of these sizes have different sizes."""
        return any(size % self._num_replicas for size in sizes)

    def _tell_of_other_sizes(self, current: list[_Iteration]) -> None:
        """Have the first rank say that a loss may be of another step than the last of `current`."""
        if any(iteration.reads_ahead for iteration in current):
            self.tell_once(
                "backward() inside replica(): a loader gave several steps before the first backward(). If the program "
                "reads ahead, gradients are wrong where a step has another size than the next, and does not divide by "
                f"{self._num_replicas} replicas: a replica's gradient counts by its part of the last step. Call "
                "backward() before the next step is asked for; or use drop_last=True; or scale the loss with "
                "compute_average_loss(…, global_batch_size=…)"
            )
        if self._last is None and self._left_uneven:
            self.tell_once(
                "backward() inside replica(): all replicas' gradients count alike, though a loader gave parts of "
                "different sizes, inside torch.no_grad() or in an iteration that is over. If the loss is of such a "
                "step, scale it with compute_average_loss(…, global_batch_size=…)"
            )

    def reduced(self) -> None:
        """The ranks have combined gradients."""
        if self._num_ranks > 1 and not self.distributed:
            self.distributed = True
            self.tell_once(
                f"backward() has combined the gradients of {self._num_ranks} ranks, though no loader was distributed "
                "and no batch was sharded. If all ranks read the same data, each example counts "
                f"{self._num_ranks} times: use strategy.prepare(loader) or strategy.shard(batch). If each rank makes "
                "data of its own, as in reinforcement learning, there is nothing to do"
            )

    def has_given(self, size: int) -> bool:
        """Whether the last step of an iterator has so many examples over all replicas."""
        return any(i.examples is not None and i.examples[-1] == size for i in self.iterations)

    def tell_once(self, text: str) -> None:
        """Have the first rank say `text`."""
        if self._is_first_rank and text not in self._said:
            tell(text)
        self._said.add(text)
