"""The examples of the steps that a program computes with: they weigh a replica's loss."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from mpistrat.machine.notices import tell
from mpistrat.replicas.input_plan import StepExamples


@dataclass
class _Iteration:
    """The steps of an iterator.

    Attributes:
        examples: of its last step.
        training: of its last step that was given while gradients were on; None if that is not known.
        order: grows with each step that any iterator gives while gradients are on; that of the last such step.
        sizes: examples over all replicas, of such steps; the last ones alone are kept.
        since: how many of them came since the last backward.
        ahead: how many of them, beside one, came before the first backward; None before that backward.
        is_only: it has given no other step, and has not ended.
        has_ended: it has no more.
    """

    iterator: weakref.ref[Any]
    examples: StepExamples | None = None
    training: StepExamples | None = None
    order: int = 0
    sizes: list[int] = field(default_factory=list)
    since: int = 0
    ahead: int | None = None
    is_only: bool = True
    has_ended: bool = False

    def take_sizes(self) -> list[int]:
        """A backward begins. Returns: the sizes of the steps that its loss may be of."""
        if self.ahead is None and self.since:
            self.ahead = self.since - 1
        ahead = self.ahead or 0
        # A program that skips its first step looks like one that reads ahead, until the end comes before a backward.
        sizes = self.sizes[-max(self.since, 1) - (ahead if self.has_ended else 0) :]
        self.sizes, self.since = self.sizes[-1 - ahead :], 0
        return sizes


class GivenSteps:
    """The steps that iterators over distributed datasets have given on this rank.

    The program computes with the last step of the iterators that it still holds. So after an evaluation in mid-epoch
    it computes with the step from before. A step from `next(iter(loader))` counts although its iterator is gone.

    Attributes:
        examples: of the step that was given last; None if that is not known.
        examples_with_gradients: as `examples`, but of the last step that was given while gradients were on, if there is
            any.
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
        self._iterations: list[_Iteration] = []
        self._order = 0
        self._said: set[str] = set()

    @property
    def _last_of_training(self) -> _Iteration | None:
        last = max(self._iterations, key=lambda iteration: iteration.order, default=None)
        return last if last is not None and last.order else None

    def give(self, iterator: Any, examples: StepExamples | None, *, gradients: bool) -> None:
        """`iterator` gives a step with these examples. Args: gradients: whether they are on."""
        self.distributed = True
        iteration = self._iteration_of(iterator)
        if iteration is None:
            iteration = _Iteration(weakref.ref(iterator, self._forget))
        else:
            iteration.is_only = False
        others = [i for i in self._iterations if i is not iteration and i.iterator() is not None]
        iteration.examples = examples
        if gradients:
            self._order += 1
            iteration.training, iteration.order = examples, self._order
            if examples is not None:
                iteration.since += 1
                iteration.sizes.append(int(examples[-1]))
        self._keep([*others, iteration])

    def _keep(self, iterations: list[_Iteration]) -> None:
        self._iterations = iterations
        last = self._last_of_training
        self.examples = iterations[-1].examples if iterations else None
        self.examples_with_gradients = self.examples if last is None else last.training

    def end(self, iterator: Any) -> None:
        """`iterator` has no more. If no backward came since its first step, its steps were those of an evaluation."""
        iteration = self._iteration_of(iterator)
        if iteration is not None:
            iteration.is_only, iteration.has_ended = False, True
            others = [i for i in self._iterations if i is not iteration]
            if iteration.ahead is None and any(i.order for i in others):
                self._keep(others)

    def _iteration_of(self, iterator: Any) -> _Iteration | None:
        return next((i for i in self._iterations if i.iterator() is iterator), None)

    def _forget(self, iterator: weakref.ref[Any]) -> None:
        iteration = next((i for i in self._iterations if i.iterator is iterator), None)
        is_last = iteration is not None and iteration is self._iterations[-1]
        if iteration is not None and not (iteration.is_only and is_last):
            self._keep([i for i in self._iterations if i is not iteration])

    def begin_backward(self, *, weighs: bool, sharded: bool) -> StepExamples | None:
        """A backward begins. Returns: the examples of the step by which a replica's loss counts; None: all count alike.

        Args:
            weighs: whether they count by examples.
            sharded: the loss may be of arrays that were sharded.
        Raises:
            RuntimeError: they do, and it is not known by which step. All ranks raise it.
        """
        last = self._last_of_training
        current = [i for i in self._iterations if i.since or i is last]
        sizes = {size for i in current for size in i.take_sizes()}
        if not weighs:
            return None
        if len(sizes) > 1 and any(size % self._num_replicas for size in sizes):
            raise RuntimeError(
                f"backward() inside replica(): loaders gave steps of {sorted(sizes)} examples before it, not all of "
                f"which divide by {self._num_replicas} replicas, and a replica's gradient counts by its part of one "
                "step: the strategy does not know which. Call backward() before the next step is asked for; or use "
                "drop_last=True; or scale the loss with compute_average_loss(…, global_batch_size=…). A step for an "
                "evaluation is asked for inside torch.no_grad()"
            )
        if any(i.ahead and not getattr(i.iterator(), "divides", True) for i in current):
            self.tell_once(
                "backward() inside replica(): a loader gave several steps before the first backward(). If the program "
                "reads ahead, gradients are wrong where a step has another size than the next, and does not divide by "
                f"{self._num_replicas} replicas: a replica's gradient counts by its part of the last step. Call "
                "backward() before the next step is asked for; or use drop_last=True; or scale the loss with "
                "compute_average_loss(…, global_batch_size=…)"
            )
        examples = self.examples if last is None and not sharded else None
        if examples is not None and examples[-1] % self._num_replicas:
            self.tell_once(
                "backward() inside replica(): all replicas' gradients count alike, though a loader gave parts of "
                "different sizes inside torch.no_grad(). If the loss is of that step, ask for the step outside it"
            )
        return None if last is None else last.training

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
        examples = (iteration.examples for iteration in self._iterations)
        return any(known is not None and known[-1] == size for known in examples)

    def tell_once(self, text: str) -> None:
        """Have the first rank say `text`."""
        if self._is_first_rank and text not in self._said:
            tell(text)
        self._said.add(text)
