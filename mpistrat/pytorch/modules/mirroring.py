"""Torch modules as mirrored variables: equal on every replica from the end of `scope()` on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
from mpistrat.pytorch.modules.strategy_modules import StrategyModules
from mpistrat.pytorch.shared_parameters.shared_parameters import SharedParameters
from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps
from mpistrat.trace import spans

_BYTES_PER_BROADCAST = 1 << 27


class NewTensors(NamedTuple):
    """Tensors that were mirrored just now.

    Attributes:
        parameters: (name, parameter).
        buffers: (name, module, its name in the module).
    """

    parameters: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.nn.Module, str]]

    def buffer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer), without buffers that are None."""
        for name, module, key in self.buffers:
            buffer = module._buffers[key]
            if buffer is not None:
                yield name, buffer


_NOTHING = NewTensors([], [])


class Mirroring(StrategyModules):
    """Modules whose parameters and buffers are equal on all replicas.

    Attributes: recorder: the modules that this rank has made in the strategy's scope.
    """

    def __init__(
        self, strategy: AnyStrategy, rule: str | None, shared_parameters: bool = False
    ) -> None:
        registry = Registry()
        super().__init__(
            strategy.extended, registry, gradients.GradientReducer(strategy, registry, rule)
        )
        self.recorder = Recorder(strategy)
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

    def mirror_new(self) -> NewTensors:
        """Mirror what is pending: new modules, materialized lazy ones, replaced parameters."""
        moved = [] if self._shared is None else self._shared.moved(self.registry)
        if not self.recorder.changed and not moved:
            return _NOTHING
        new = NewTensors([], [])
        if self.recorder.changed:
            self.recorder.changed = False
            roots = self.recorder.roots()
            self._bring(roots)
            new = self._collect(roots)
        new.parameters[:0] = moved
        if new.parameters or new.buffers:
            self._mirror_tensors(new)
        return new

    before_run = mirror_new

    def stop_recording(self, failed: bool) -> None:
        if not failed:
            self.mirror_new()

    def mirror(self, module: Any) -> NewTensors:
        require_cross_replica(self._extended.strategy, "mirror")
        modules: list[torch.nn.Module] = []
        tensors: list[torch.Tensor] = []
        for value in _flatten(module):
            if isinstance(value, torch.nn.Module):
                self.recorder.record(value)
                modules.append(value)
            else:
                tensors.append(value)
        self._bring(modules)
        new = self._collect(modules, again=True)
        new.parameters.extend((f"parameter {i}", tensor) for i, tensor in enumerate(tensors))
        self._mirror_tensors(new)
        return new

    def _bring(self, modules: Iterable[torch.nn.Module]) -> None:
        """Put them where the strategy keeps modules, if it says where."""
        if self._extended.replicas.device_of_modules is not None:
            for module in modules:
                place(module, torch.device(self._extended.replicas.device_of_modules))

    def _collect(self, roots: Iterable[torch.nn.Module], again: bool = False) -> NewTensors:
        """What is in `roots`, by name: all of it (`again`), or what is not mirrored yet."""
        parameters, slots = new = NewTensors([], [])
        for root in roots:
            for name, parameter in root.named_parameters():
                if _is_pending(parameter):
                    self.recorder.changed = True  # look again at each run until it is known
                elif again or parameter not in self.registry:
                    parameters.append((f"{type(root).__name__}.{name}", parameter))
            for path, module in root.named_modules(prefix=type(root).__name__):
                for key, buffer in module._buffers.items():
                    if buffer is None:
                        continue
                    if _is_pending(buffer):
                        self.recorder.changed = True
                    elif again or self.registry.buffer(module, key) is None:
                        slots.append((f"{path}.{key}", module, key))
        return new

    def _mirror_tensors(self, new: NewTensors) -> None:
        """Agree on names, shapes and dtypes, broadcast rank 0's values, and register the tensors."""
        with spans.current.range("mirror"):
            tensors = [*new.parameters, *new.buffer_tensors()]
            self._agree([f"{name}: {t.dtype}{list(t.shape)}" for name, t in tensors])
            self._broadcast([t.detach() for _, t in tensors])
            self._drop_dead()
            for name, parameter in new.parameters:
                if parameter not in self.registry:
                    self.registry.add_parameter(name, parameter)
                    if self._extended.num_replicas_in_sync > 1:
                        self.reducer.guard(parameter)
            for name, module, key in new.buffers:
                if self.registry.buffer(module, key) is None:
                    self.registry.add_buffer(name, module, key)
                    buffers.average_before_state_dict(module, self._extended.strategy)
                slot = self.registry.buffer(module, key)
                assert slot is not None
                slot.settle([slot.tensor()])
            if self._shared is not None:
                self._shared.share([parameter for _, parameter in new.parameters], self.registry)

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
