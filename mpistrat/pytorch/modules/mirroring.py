"""Torch modules as mirrored variables: equal on every replica from the end of `scope()` on."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from mpistrat.communicators import reducing
from mpistrat.context import AnyStrategy, require_cross_replica
from mpistrat.cross_device_ops import packing
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch import optimizers, virtual_replicas
from mpistrat.pytorch.gradients import reducer as gradients
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.placing import place
from mpistrat.pytorch.modules.recording import Recorder
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.pytorch.shared_parameters.shared_parameters import SharedParameters
from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps
from mpistrat.trace import spans

_BYTES_PER_BROADCAST = 1 << 27

_all: weakref.WeakSet[Mirroring] = weakref.WeakSet()

_Parameter = tuple[str, torch.Tensor]
_Buffer = tuple[str, torch.nn.Module, str]


class Mirroring:
    """What a strategy keeps for PyTorch: which parameters are mirrored, and what is still pending.

    Attributes: serves: whether the parameters are on servers.
    """

    serves = False

    def __init__(
        self, strategy: AnyStrategy, rule: str | None, shared_parameters: bool = False
    ) -> None:
        self._extended = strategy.extended
        self.registry = Registry()
        self.reducer = gradients.GradientReducer(strategy, self.registry, rule)
        self._recorder = Recorder(strategy)
        self._shared: SharedParameters | None = None
        if shared_parameters and self._extended.num_replicas_in_sync > 1:
            self._shared = self.reducer.shared = SharedParameters(self._extended.communicator)
            self.reducer.slice_steps = SliceSteps(self._shared)
            self.reducer.overlap.decline("parameters are shared")
        if self._extended.num_replicas_in_sync > 1:
            gradients.install()
            optimizers.install()
        if self._extended.replicas.count > 1:
            virtual_replicas.install(self._extended, self.registry)
        _all.add(self)

    @property
    def strategy(self) -> Any:
        return self._extended.strategy

    def stop_recording(self, failed: bool) -> None:
        """The outermost `scope()` is left. After an error nothing is sent: other ranks may not be here."""
        if not failed:
            self.before_run()

    def before_run(self) -> None:
        """Mirror what is pending: new modules, materialized lazy ones, replaced parameters."""
        parameters = [] if self._shared is None else self._shared.moved(self.registry)
        slots: list[_Buffer] = []
        if self._recorder.changed:
            self._recorder.changed = False
            roots = self._recorder.roots()
            self._bring(roots)
            new, slots = self._collect(roots)
            parameters += new
        if parameters or slots:
            self._mirror_tensors(parameters, slots)

    def after_run(self) -> None:
        """A run has ended well."""

    def have_loaded(self, objects: Iterable[Any]) -> None:
        """These, of all kinds, have been given the states of a checkpoint."""

    def mirror(self, module: Any) -> None:
        """The work of `Strategy.mirror`: a module, a parameter, or an iterable of them."""
        require_cross_replica(self._extended.strategy, "mirror")
        modules: list[torch.nn.Module] = []
        tensors: list[torch.Tensor] = []
        for value in _flatten(module):
            if isinstance(value, torch.nn.Module):
                self._recorder.record(value)
                modules.append(value)
            else:
                tensors.append(value)
        self._bring(modules)
        parameters, slots = self._collect(modules, again=True)
        parameters += [(f"parameter {i}", tensor) for i, tensor in enumerate(tensors)]
        self._mirror_tensors(parameters, slots)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """The work of `Strategy.no_sync`."""
        return self.reducer.no_sync()

    def explain(self) -> str:
        """How gradients are reduced, for people."""
        return self.reducer.explain()

    def _bring(self, modules: Iterable[torch.nn.Module]) -> None:
        """Put them where the strategy keeps modules, if it says where."""
        if self._extended.replicas.device_of_modules is not None:
            for module in modules:
                place(module, torch.device(self._extended.replicas.device_of_modules))

    def _collect(
        self, roots: Iterable[torch.nn.Module], again: bool = False
    ) -> tuple[list[_Parameter], list[_Buffer]]:
        """What is in `roots`, by name: all of it (`again`), or what is not mirrored yet."""
        parameters: list[_Parameter] = []
        slots: list[_Buffer] = []
        for root in roots:
            for name, parameter in root.named_parameters():
                if _is_pending(parameter):
                    self._recorder.changed = True  # look again at each run until it is known
                elif again or parameter not in self.registry:
                    parameters.append((f"{type(root).__name__}.{name}", parameter))
            for path, module in root.named_modules(prefix=type(root).__name__):
                for key, buffer in module._buffers.items():
                    if buffer is None:
                        continue
                    if _is_pending(buffer):
                        self._recorder.changed = True
                    elif again or self.registry.buffer(module, key) is None:
                        slots.append((f"{path}.{key}", module, key))
        return parameters, slots

    def _mirror_tensors(self, parameters: list[_Parameter], slots: list[_Buffer]) -> None:
        """Agree on names, shapes and dtypes, broadcast rank 0's values, and register the tensors."""
        with spans.current.range("mirror"):
            tensors: list[_Parameter] = [*parameters]
            for name, module, key in slots:
                buffer = module._buffers[key]
                assert buffer is not None
                tensors.append((name, buffer))
            self._agree([f"{name}: {t.dtype}{list(t.shape)}" for name, t in tensors])
            self._broadcast([t.detach() for _, t in tensors])
            self._drop_dead()
            for name, parameter in parameters:
                if parameter not in self.registry:
                    self.registry.add_parameter(name, parameter)
                    if self._extended.num_replicas_in_sync > 1:
                        self.reducer.guard(parameter)
            for name, module, key in slots:
                if self.registry.buffer(module, key) is None:
                    self.registry.add_buffer(name, module, key)
                    buffers.average_before_state_dict(module, self._extended.strategy)
                slot = self.registry.buffer(module, key)
                assert slot is not None
                slot.settle([slot.tensor()])
            if self._shared is not None:
                self._shared.share([parameter for _, parameter in parameters], self.registry)

    def _agree(self, described: list[str]) -> None:
        communicator = self._extended.communicator
        if communicator.size == 1:
            return
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
        digests = communicator.all_gather_object(digest, label="mirrored parameters")
        if len(set(digests)) > 1:
            everyone = communicator.all_gather_object(described, label="mirrored parameters")
            raise CollectiveMismatchError(_first_difference(everyone))

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Rank 0's values to all, packed into as few messages as fit in `_BYTES_PER_BROADCAST`."""
        communicator = self._extended.communicator
        if communicator.size == 1:
            return
        as_bytes = [torch.empty(t.nbytes, dtype=torch.uint8, device="meta") for t in tensors]
        start = 0
        for group in packing.group_by_size(as_bytes, _BYTES_PER_BROADCAST):
            own = tensors[start : start + len(group)]
            start += len(group)
            if communicator.rank == 0:
                message = packing.concatenated([_bytes_of(tensor) for tensor in own])
            else:
                message = torch.empty(sum(t.nbytes for t in own), dtype=torch.uint8)
            communicator.broadcast(message, label="mirrored parameters")
            if communicator.rank != 0:
                with torch.no_grad():
                    for tensor, piece in zip(own, packing.unpack(message, group), strict=True):
                        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def _drop_dead(self) -> None:
        alive = np.array(self.registry.alive(), np.uint8)
        if alive.size:
            in_use = reducing("max", "parameters still in use")
            self._extended.communicator.all_reduce(alive, in_use)
            if not alive.all():
                self.registry.keep([bool(a) for a in alive])
                self.reducer.overlap.forget()


def strategy_of(value: Any) -> AnyStrategy | None:
    """The strategy that mirrors the parameters of `value`, a module or an optimizer; None if there is none."""
    parameters: Iterable[torch.Tensor] = ()
    if isinstance(value, torch.nn.Module):
        parameters = value.parameters()
    elif isinstance(value, torch.optim.Optimizer):
        parameters = (p for group in value.param_groups for p in group["params"])
    for parameter in parameters:
        for mirroring in _all:
            if parameter in mirroring.registry:
                return mirroring.strategy
    return None


def _flatten(value: Any) -> Iterator[torch.nn.Module | torch.Tensor]:
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, torch.Tensor):
        if not value.is_leaf:
            raise ValueError(
                f"mirror takes parameters, got the result of an operation, {value.grad_fn!r:.60}"
            )
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _flatten(item)
    else:
        raise TypeError(f"mirror takes a torch module or parameters, got {value!r:.60}")


def _is_pending(tensor: torch.Tensor) -> bool:
    """Whether shape or values come later: of lazy modules with the first forward, of meta ones by to_empty."""
    return is_lazy(tensor) or tensor.is_meta


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    host = tensor.cpu().contiguous()
    return host.reshape(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)


def _first_difference(everyone: list[list[str]]) -> str:
    for rank, described in enumerate(everyone[1:], start=1):
        for i in range(max(len(described), len(everyone[0]))):
            theirs = described[i] if i < len(described) else "nothing"
            ours = everyone[0][i] if i < len(everyone[0]) else "nothing"
            if theirs != ours:
                return (
                    "the ranks' models differ, so they cannot be mirrored: parameter or buffer "
                    f"{i} is {ours} on rank 0 and {theirs} on rank {rank}. Build the same modules, in the "
                    "same order, on every rank"
                )
    return "the ranks' models differ"
