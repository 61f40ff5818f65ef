"""Gradients on their way from the autograd engine: which come, and which the program uses before they are reduced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.context import current_local_replica, has_strategy, in_cross_replica_context
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.buckets import Buckets
from mpistrat.pytorch.modules.registry import Registry


@dataclasses.dataclass
class _Backward:
    """A backward of one replica.

    Attributes:
        buckets: take gradients as they come.
        unmirrored: parameters of `made_in_run` that had no gradient.
        arrived: parameters that may not change any more; the version of each; whether it has its gradient, not in a
            bucket.
    """

    buckets: Buckets | None
    unmirrored: list[torch.Tensor]
    arrived: list[tuple[torch.Tensor, int, bool]] = dataclasses.field(default_factory=list)


class Arrivals:
    """The gradients that a strategy's replicas get.

    Args:
        registry: of the mirrored parameters.

    Attributes:
        made_in_run: names of the parameters that replicas have made inside `run`.
    """

    def __init__(self, registry: Registry) -> None:
        self.made_in_run: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._registry = registry
        self._backwards: dict[
            int, _Backward
        ] = {}  # by local replica, those that the engine computes now

    def guard(self, parameter: torch.Tensor) -> None:
        """Watch for gradients that reach a mirrored parameter by a way that is not reduced."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return
        reference = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            """Its gradient has grown."""
            arrivals = reference()
            if arrivals is None:
                return
            if not arrivals._backwards:
                in_scope = has_strategy() and in_cross_replica_context()
                where = " (in scope(), where no replica computes)" if in_scope else ""
                raise RuntimeError(
                    f"backward() outside run{where} reached a mirrored parameter, where its gradient is not reduced "
                    "over replicas; call loss.backward() inside strategy.run(step), or inside "
                    "strategy.replica(), on the thread that has entered it; or use torch.autograd.grad, which leaves "
                    ".grad alone"
                )
            backward = arrivals._backward()
            if backward.buckets is not None:
                backward.buckets.arrived(parameter)
            has_gradient = parameter.grad is not None
            backward.arrived.append((parameter, parameter._version, has_gradient))

        hooks.first_when_accumulated(parameter, hook)

    def _backward(self) -> _Backward:
        """The one that calls a hook: on the host the engine does so on the replica's thread."""
        if len(self._backwards) == 1:
            return next(iter(self._backwards.values()))
        return self._backwards[current_local_replica() or 0]

    @contextlib.contextmanager
    def watched(
        self, replica: int, parameters: Sequence[torch.Tensor | None], buckets: Buckets | None
    ) -> Iterator[Callable[..., None]]:
        """Inside, the engine computes a backward of local replica `replica`.

        Args:
            parameters: by slot.
            buckets: take gradients as they come.
        Gives: `_check`, to be called when the engine has ended, and before gradients are reduced.
        """
        unmirrored = [p for p in self.made_in_run if p.grad is None and p not in self._registry]
        backward = self._backwards[replica] = _Backward(buckets, unmirrored)
        present = [parameter for parameter in parameters if parameter is not None]
        # By hooks beside ours the program may write any parameter.
        if any(p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > 1 for p in present):
            backward.arrived = [(p, p._version, False) for p in present if not p.is_inference()]
        try:
            alone = len(self._backwards) == 1  # replicas may leave in another order
            with hooks.noticing_data() if alone else contextlib.nullcontext(frozenset) as written:
                yield functools.partial(self._check, backward, written)
        finally:
            del self._backwards[replica]

    def _check(
        self, backward: _Backward, written: Callable[[], frozenset[int]], *, in_run: bool
    ) -> None:
        """
        Args:
            written: gives the ids of the parameters that were written through `.data`.
            in_run: inside `run`, and not in a `replica()`, where whole programs live.
        Raises:
            RuntimeError: a parameter was updated, or its gradient is gone, or no strategy keeps it equal.
        """
        through_data = written()
        for parameter, version, had_gradient in backward.arrived:
            is_gone = had_gradient and parameter.grad is None
            if is_gone or parameter._version != version or id(parameter) in through_data:
                name = next(s.name for s in self._registry.slots if s.reference() is parameter)
                happened = "lost its gradient" if is_gone else "was changed"
                raise RuntimeError(
                    f"parameter {name} {happened} inside backward(), before gradients are reduced over replicas: each "
                    "rank would make another update. Update parameters after backward(); or call backward() inside "
                    "strategy.no_sync(), and give the hook's gradient to get_replica_context().all_reduce first"
                )
        reached = [self.made_in_run[p] for p in backward.unmirrored if p.grad is not None]
        if in_run and reached:
            raise RuntimeError(
                f"backward() inside run reached {reached[0]}, of a module that was made inside run: it is no variable "
                "of the strategy, so nothing keeps it equal on all ranks. Build the module before run, in "
                "strategy.scope(); or use torch.autograd.grad where each replica is to have a module of its own"
            )
