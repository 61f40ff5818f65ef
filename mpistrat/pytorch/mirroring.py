"""Torch modules as mirrored variables: equal on every replica from the end of `scope()` on."""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch import backward, buffers, optimizers, virtual_replicas
from mpistrat.pytorch.gradients import GradientReducer
from mpistrat.pytorch.recording import Recorder
from mpistrat.pytorch.registry import Registry

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_BYTES_PER_BROADCAST = 1 << 28


class Mirroring:
    """What a strategy keeps for PyTorch: which parameters are mirrored, and what is still pending."""

    def __init__(self, strategy: Strategy, gradients: str | None) -> None:
        self._strategy: Any = weakref.proxy(strategy)
        self._extended = strategy.extended
        self.registry = Registry()
        self.reducer = GradientReducer(strategy, self.registry, gradients)
        self._recorder = Recorder(strategy)
        self._numbered = 0
        if self._extended.num_replicas_in_sync > 1:
            backward.install()
            optimizers.install()
        if self._extended.num_local_replicas > 1:
            virtual_replicas.install(self._extended, self.registry)

    def start_recording(self) -> None:
        """The outermost `scope()` is entered; modules built from here on are recorded."""

    def stop_recording(self, failed: bool) -> None:
        """The outermost `scope()` is left. After an error nothing is sent: other ranks may not be here."""
        if not failed:
            self.before_run()

    def before_run(self) -> None:
        """Mirror what is pending: new modules, materialized lazy ones, replaced parameters."""
        if self._recorder.changed:
            self._recorder.changed = False
            self._mirror(self._recorder.roots())

    def mirror(self, module: Any) -> None:
        """The work of `Strategy.mirror`: a module, a parameter, or an iterable of them."""
        if isinstance(module, torch.nn.Module):
            self._recorder.record(module)
            self._mirror([module], again=True)
        elif isinstance(module, torch.Tensor):
            self._mirror_tensors([(f"parameter {self._number()}", module)], [])
        elif isinstance(module, Iterable):
            for one in module:
                self.mirror(one)
        else:
            raise TypeError(f"mirror takes a torch module or parameters, got {module!r:.60}")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The work of `Strategy.no_sync`."""
        outer, self.reducer.synchronizes = self.reducer.synchronizes, False
        try:
            yield
        finally:
            self.reducer.synchronizes = outer

    def _number(self) -> int:
        self._numbered += 1
        return self._numbered - 1

    def _mirror(self, roots: list[torch.nn.Module], again: bool = False) -> None:
        parameters: list[tuple[str, torch.Tensor]] = []
        slots: list[tuple[str, torch.nn.Module, str]] = []
        for root in roots:
            prefix = f"{type(root).__name__}.{self._number()}"
            for name, parameter in root.named_parameters():
                if is_lazy(parameter):
                    # Its shape is known after the first forward: look again at each run until then.
                    self._recorder.changed = True
                elif again or parameter not in self.registry:
                    parameters.append((f"{prefix}.{name}", parameter))
            for path, module in root.named_modules():
                for key, buffer in module._buffers.items():
                    if buffer is None or is_lazy(buffer):
                        continue
                    if again or not self.registry.knows_buffer(module, key):
                        slots.append((f"{prefix}.{path}.{key}", module, key))
        if parameters or slots:
            self._mirror_tensors(parameters, slots)

    def _mirror_tensors(
        self,
        parameters: list[tuple[str, torch.Tensor]],
        slots: list[tuple[str, torch.nn.Module, str]],
    ) -> None:
        """Agree on names, shapes and dtypes, broadcast rank 0's values, and register the tensors."""
        tensors = [*parameters, *((name, module._buffers[key]) for name, module, key in slots)]
        self._agree([f"{n}: {t.dtype}{list(t.shape)}" for n, t in tensors if t is not None])
        self._broadcast([t.detach() for _, t in tensors if t is not None])
        self._drop_dead()
        for name, parameter in parameters:
            if parameter not in self.registry:
                self.registry.add_parameter(name, parameter)
        for name, module, key in slots:
            if not self.registry.knows_buffer(module, key):
                self.registry.add_buffer(name, module, key)
                buffers.average_before_state_dict(module, self._strategy)
        fresh = {(id(module), key) for _, module, key in slots}
        for slot in self.registry.buffers:
            if (id(slot.module()), slot.key) in fresh:
                slot.settle([slot.tensor()])

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
        pending = list(tensors)
        while pending:
            pack: list[torch.Tensor] = []
            length = 0
            while pending and (not pack or length + pending[0].nbytes <= _BYTES_PER_BROADCAST):
                length += pending[0].nbytes
                pack.append(pending.pop(0))
            message = torch.empty(length, dtype=torch.uint8)
            if communicator.rank == 0:
                torch.cat([_bytes_of(t) for t in pack], out=message)
            communicator.broadcast(message, label="mirrored parameters")
            if communicator.rank != 0:
                pieces = message.split([t.nbytes for t in pack])
                with torch.no_grad():
                    for tensor, piece in zip(pack, pieces, strict=True):
                        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def _drop_dead(self) -> None:
        alive = np.array([p is not None for p in self.registry.parameters()], np.uint8)
        if alive.size:
            self._extended.communicator.all_reduce(alive, "max", label="parameters still in use")
            if not alive.all():
                self.registry.drop_dead([bool(a) for a in alive])


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
