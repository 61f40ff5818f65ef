"""Several replicas of a torch module in one rank: one storage of parameters, the rest swapped.

`.grad`, buffers and the state of the random generator belong to a replica; they are put away and
brought out where replicas take turns.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.context import get_replica_context
from mpistrat.pytorch.registry import BufferSlot, Registry

if TYPE_CHECKING:
    from mpistrat.strategy_extended import StrategyExtended

_states: weakref.WeakKeyDictionary[Any, TorchState] = weakref.WeakKeyDictionary()


class TorchState:
    """A `ReplicaState` for PyTorch."""

    def __init__(self, registry: Registry, count: int) -> None:
        self._registry = registry
        self._count = count
        self._gradients: list[dict[int, torch.Tensor]] = [{} for _ in range(count)]
        self._buffers: list[dict[int, torch.Tensor]] = [{} for _ in range(count)]
        self._generators: list[torch.Tensor] = []
        self._left: torch.Tensor | None = None

    def begin(self) -> None:
        """A run starts: a generator that was seeded meanwhile is seeded for every replica."""
        now = torch.get_rng_state()
        if self._left is None or not torch.equal(now, self._left):
            self._generators = [now.clone() for _ in range(self._count)]
        for index, slot in enumerate(self._registry.buffers):
            tensor = slot.tensor()
            if index not in self._buffers[-1] and tensor is not None:
                copies = [tensor.clone() for _ in range(1, self._count)]
                for own, copy in zip(self._buffers[1:], copies, strict=True):
                    own[index] = copy
                slot.settle([tensor, *copies])

    def end(self) -> None:
        """A run has ended, with replica 0's state out."""
        self._left = torch.get_rng_state()
        self._generators[0] = self._left

    def inherit(self) -> Callable[[], contextlib.AbstractContextManager[object]]:
        grad = torch.is_grad_enabled()
        inference = torch.is_inference_mode_enabled()
        device = torch.get_default_device()
        autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in ("cpu", "cuda")
        ]

        @contextlib.contextmanager
        def enter() -> Iterator[None]:
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(grad))
                if device != torch.device("cpu"):
                    stack.enter_context(device)
                for kind, dtype, enabled in autocast:
                    if enabled:
                        stack.enter_context(torch.autocast(kind, dtype=dtype))
                yield

        return enter

    def switch(self, leaving: int, entering: int) -> None:
        away, out = self._gradients[leaving], self._gradients[entering]
        away.clear()
        for i, parameter in enumerate(self._registry.parameters()):
            if parameter is not None:
                if parameter.grad is not None:
                    away[i] = parameter.grad
                parameter.grad = out.get(i)
        for index, slot in enumerate(self._registry.buffers):
            module, tensor = slot.module(), slot.tensor()
            if module is None or tensor is None:
                continue
            self._buffers[leaving][index] = tensor
            module._buffers[slot.key] = self._buffers[entering].get(index, tensor)
        self._generators[leaving] = torch.get_rng_state()
        torch.set_rng_state(self._generators[entering])

    def copies(self, slots: Sequence[BufferSlot]) -> list[list[torch.Tensor | None]]:
        """Each replica's copy of the buffers `slots`, with replica 0's in the modules."""
        indices = [self._registry.buffers.index(slot) for slot in slots]
        own = [slot.tensor() for slot in slots]
        others = [
            [
                self._buffers[i].get(index, tensor)
                for index, tensor in zip(indices, own, strict=True)
            ]
            for i in range(1, self._count)
        ]
        return [own, *others]


def install(extended: StrategyExtended, registry: Registry) -> None:
    """Swap the state of torch modules between the replicas of `extended`."""
    state = TorchState(registry, extended.num_local_replicas)
    _states[extended] = state
    extended.replicas.states.append(state)
    _guard_schedulers()


def copies_of_buffers(
    extended: StrategyExtended, slots: Sequence[BufferSlot]
) -> list[list[torch.Tensor | None]]:
    """Each local replica's copy of the buffers `slots`. Context: cross-replica."""
    state = _states.get(extended)
    return [[slot.tensor() for slot in slots]] if state is None else state.copies(slots)


def _guard_schedulers() -> None:
    """Make schedulers and gradient scalers refuse to step once per replica of one rank."""
    schedulers = torch.optim.lr_scheduler
    classes = [
        c
        for c in vars(schedulers).values()
        if isinstance(c, type) and issubclass(c, schedulers.LRScheduler)
    ]
    for cls in classes:
        _guard(cls, "step", "the scheduler's step()")
    for name in ("step", "update", "unscale_"):
        _guard(torch.amp.GradScaler, name, f"GradScaler.{name}()")


def _guard(cls: type, name: str, call: str) -> None:
    original = cls.__dict__.get(name)
    if original is None or hasattr(original, "_mpistrat_guarded"):
        return

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = get_replica_context()
        if context is not None and context.strategy.extended.num_local_replicas > 1:
            raise RuntimeError(
                f"{call} inside run would happen once for each of the "
                f"{context.strategy.extended.num_local_replicas} replicas of this rank; call it after run, "
                "or start one rank per replica"
            )
        return original(self, *args, **kwargs)

    guarded.__name__, guarded.__doc__ = name, original.__doc__
    guarded._mpistrat_guarded = True  # type: ignore[attr-defined]
    setattr(cls, name, guarded)
