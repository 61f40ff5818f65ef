"""Hooks that note each gradient from the autograd engine, and checks that parameters did not change before the sum."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.context import current_local_replica, in_cross_replica_context
from mpistrat.pytorch import hooks
from mpistrat.pytorch.modules.registry import Registry, is_inexact

if TYPE_CHECKING:
    from mpistrat.pytorch.gradients.agreement import ReplicaBackward


class Arrivals:
    """Notes each gradient that a strategy's mirrored parameters get, and fills buckets with it.

    Attributes:
        made_in_run: names of the parameters that replicas have made inside `run`, by parameter. `Recorder` adds them.
            The keys are weak.
    """

    def __init__(self, registry: Registry) -> None:
        self.made_in_run: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._registry = registry
        # The backwards that the engine computes now, by local replica.
        self._backwards: dict[int, ReplicaBackward] = {}
        reference = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            """Mark the gradient of `parameter` as there. Send its bucket if no other gradient is missing.

            Called by: the engine, when it has added to `parameter.grad`.
            """
            arrivals = reference()
            if arrivals is None:
                return
            if len(arrivals._backwards) == 1:
                (backward,) = arrivals._backwards.values()
            else:
                backward = arrivals._backward()
            backward.came.append((parameter, parameter._version))
            buckets = backward.buckets
            if buckets is None:
                return
            bucket = buckets.places.get(id(parameter))
            if bucket is None or not bucket.missing:
                return  # its bucket has left: the gradient stays in `.grad`
            if len(parameter._post_accumulate_grad_hooks) > 1:
                # A hook of the program will look at the gradient, too.
                gradient: Any = parameter.grad
                buckets.shown.setdefault(id(parameter), (parameter, gradient, gradient._version))
            if buckets.stream is not None:
                bucket.writers.add(buckets.stream())
            bucket.missing.discard(id(parameter))
            if not bucket.missing:
                buckets.filled(bucket)

        self._hook = hook

    def guard(self, parameter: torch.Tensor) -> None:
        """Register the hook that fills buckets on `parameter`, unless its dtype is an integer or bool.

        A backward outside `run` and `replica()` that reaches `parameter` then raises RuntimeError.
        Called by: `Mirroring`, for each parameter that is mirrored.
        """
        if is_inexact(parameter):
            hooks.first_when_accumulated(parameter, self._hook)

    def _backward(self) -> ReplicaBackward:
        """Return the record of the backward of this thread's replica.

        If a rank has several replicas, each runs in its own thread. The parameters are on the host, so the autograd
        engine calls a parameter's hook on the thread that called backward(): the thread of the replica.
        Raises: RuntimeError if no replica of this rank is in a backward, because the gradient would not be reduced.
        """
        if self._backwards:
            return self._backwards[current_local_replica() or 0]
        where = ""
        if in_cross_replica_context():
            where = " (in scope(), where no replica computes)"
        raise RuntimeError(
            f"backward() outside run{where} reached a mirrored parameter, where its gradient is not reduced "
            "over replicas. Call loss.backward() inside strategy.run(step), or inside strategy.replica() on the thread "
            "that has entered it; or use torch.autograd.grad: it leaves .grad alone"
        )

    @contextlib.contextmanager
    def watched(self, step: ReplicaBackward) -> Iterator[Callable[[], None]]:
        """Let hooks note the gradients of `step` while the caller runs the autograd engine inside the block.

        Yields a function without arguments. The caller calls it after the engine has ended and before gradients are
        reduced. It raises the RuntimeErrors of `_check`.
        """
        watched = list[tuple[torch.Tensor, int]]()
        unmirrored = []
        for parameter in self.made_in_run:
            if parameter.grad is None and parameter not in self._registry:
                unmirrored.append(parameter)  # nothing would reduce its gradient
        for parameter in step.parameters:
            if parameter is None:
                continue
            hooks_after = parameter._post_accumulate_grad_hooks or ()
            if parameter._backward_hooks or len(hooks_after) > 1:
                # The program has hooks on a parameter: they may write any parameter, so all are watched.
                there = [p for p in step.parameters if p is not None]
                watched = [(p, p._version) for p in there if not p.is_inference()]
                break
        self._backwards[step.replica] = step
        try:
            if len(self._backwards) == 1:
                noticing: Any = hooks.noticing_data()
            else:  # replicas may leave in another order
                noticing = contextlib.nullcontext(())
            with noticing as taken:
                yield functools.partial(self._check, step, unmirrored, watched, taken)
        finally:
            del self._backwards[step.replica]

    def _check(
        self,
        step: ReplicaBackward,
        unmirrored: Sequence[torch.Tensor],
        watched: Sequence[tuple[torch.Tensor, int]],
        taken: Sequence[tuple[int, torch.Tensor, int]],
    ) -> None:
        """Raise if the backward `step` would make the parameters of ranks differ; return None if not.

        Args:
            step: the backward that the engine has computed.
            unmirrored: parameters of `made_in_run` that had no gradient before the backward.
            watched: parameters that must not change during the backward, each with its version before.
            taken: (parameter's id, tensor, version) of each `.data` tensor that the program took during the backward.
        Raises:
            RuntimeError: a mirrored parameter was changed or lost its gradient inside backward(); or, inside `run`, a
                parameter of `unmirrored` got a gradient.
        """
        in_buckets = {} if step.buckets is None else step.buckets.taken
        for parameter, _ in step.came:
            if parameter.grad is None and id(parameter) not in in_buckets:
                self._raise_changed(parameter, "lost its gradient")
        written = set()
        for of, tensor, version in taken:
            if tensor._version != version:
                written.add(of)
        for parameter, version in (*step.came, *watched):
            if parameter._version != version or id(parameter) in written:
                self._raise_changed(parameter, "was changed")
        for parameter in unmirrored:
            # Inside `replica()` a whole program runs: it may have models that are not mirrored.
            if parameter.grad is not None and not step.in_block:
                raise RuntimeError(
                    f"backward() inside run reached {self.made_in_run[parameter]}, of a module that was made inside "
                    "run: it is no variable of the strategy, so nothing keeps it equal on all ranks. Build the module "
                    "before run, in strategy.scope(); or, if each replica is to have a module of its own, use "
                    "torch.autograd.grad"
                )

    def _raise_changed(self, parameter: torch.Tensor, happened: str) -> NoReturn:
        name = next(s.name for s in self._registry.slots if s.reference() is parameter)
        raise RuntimeError(
            f"parameter {name} {happened} inside backward(), before gradients are reduced over replicas: each "
            "rank would make another update. Update parameters after backward(); or call backward() inside "
            "strategy.no_sync(), and give the hook's gradient to get_replica_context().all_reduce first"
        )
