"""Torch modules whose parameters and buffers are on servers.

A run begins with what the servers have then; an optimizer's step sends its gradients there (`remote_steps`). What a run
adds to buffers, such as batch norm's statistics, is added on the servers when it ends, as TensorFlow does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mpistrat.context import get_replica_context, has_strategy
from mpistrat.parameter_server.client import Address, Change, Client
from mpistrat.parameter_server.modules import remote_rows, remote_steps
from mpistrat.parameter_server.modules.remote_tensor import RemoteTensor
from mpistrat.parameter_server.staleness import WorkerClock
from mpistrat.pytorch.modules.mirroring import Mirroring
from mpistrat.pytorch.modules.registry import BufferSlot, version

if TYPE_CHECKING:
    from mpistrat.strategy import Strategy

_modules_of: WeakIdKeyDictionary = (
    WeakIdKeyDictionary()
)  # by module: a weak reference to its RemoteModules


class RemoteModules(Mirroring):
    """What a strategy with servers keeps for PyTorch.

    Args:
        place: finds a tensor of that name a place on the servers, once on each rank in the same order; the first
            values are those of the rank that `owns`.
        owns: whether this rank's values are everybody's where it writes parameters outside optimizers' steps.
        clock: this worker's; None where nothing is combined over workers.
    """

    serves = True

    def __init__(
        self,
        strategy: Strategy,
        gradients: str | None,
        client: Client,
        place: Callable[[str, torch.Tensor], Sequence[Address]],
        owns: bool,
        clock: WorkerClock | None,
    ) -> None:
        super().__init__(strategy, gradients)
        self._client, self._place, self._owns = client, place, owns
        self._remote: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._steps = remote_steps.RemoteSteps(client, owns, clock, self._rule)
        # Buffers, and what was pulled: what a run adds to them is sent.
        self._pulled: list[tuple[RemoteTensor, BufferSlot, torch.Tensor, torch.Tensor]] = []
        remote_steps.install()

    def _rule(self) -> str:
        workers = self.strategy.workers_combined
        return "sum" if workers == 1 else self.reducer.rule_of(f"step() over {workers} workers")

    def before_run(self) -> None:
        """Serve what is new, send what this rank has written if it owns that, and pull everything."""
        super().before_run()
        slots = {id(slot.tensor()): slot for slot in self.registry.buffers}  # modules may share one
        buffers = self._known(slot.tensor() for slot in slots.values())
        self._sync([*self._known(self.registry.parameters()), *buffers])
        self._pulled = [
            (self._remote[tensor], slot, tensor, tensor.clone())
            for slot in slots.values()
            if (tensor := slot.tensor()) is not None and tensor in self._remote
        ]

    def refresh(self, module: torch.nn.Module) -> None:
        """Let the module's own parameters and buffers be what the servers have now."""
        self._sync(self._known([*module._parameters.values(), *module._buffers.values()]))

    def _known(
        self, tensors: Iterable[torch.Tensor | None]
    ) -> list[tuple[RemoteTensor, torch.Tensor]]:
        """Those that are on servers, and whose values are here."""
        return [
            (self._remote[tensor], tensor.detach())
            for tensor in tensors
            if tensor is not None
            and tensor in self._remote
            and not isinstance(tensor, remote_rows.RemoteRows)
        ]

    def _sync(self, tensors: Sequence[tuple[RemoteTensor, torch.Tensor]]) -> None:
        if self._owns:
            self._assign([one for one in tensors if version(one[1]) != one[0].version])
        self._client.pull_into(
            [piece for remote, tensor in tensors for piece in remote.pieces(tensor)]
        )
        for remote, tensor in tensors:
            remote.version = version(tensor)

    def after_run(self) -> None:
        """Send what the run has added to buffers."""
        changes = []
        for remote, slot, tensor, before in self._pulled:
            _put_back(slot, tensor)
            if tensor.dtype is not torch.bool and tensor.shape == before.shape:
                added = tensor - before
                if added.any():
                    changes += [
                        Change(address, "assign_add", piece)
                        for address, piece in remote.pieces(added)
                    ]
            remote.version = version(tensor)
        self._pulled = []
        if changes:
            self._client.change(changes)

    def have_loaded(self, objects: Iterable[Any]) -> None:
        """Now, before other workers train: the servers get what this rank has, if it owns that.

        Called by: every worker, with the same objects, for optimizers have numbers in the order in which they come.
        """
        self.before_run()
        for one in objects:
            if isinstance(one, torch.optim.Optimizer) and remote_steps.has_remote_parameters(one):
                self._steps.of(one)

    def mirror(self, module: Any) -> None:
        super().mirror(module)
        self.before_run()

    def _assign(self, tensors: Sequence[tuple[RemoteTensor, torch.Tensor]]) -> None:
        changes = [
            Change(address, "assign", piece)
            for remote, tensor in tensors
            for address, piece in remote.pieces(tensor)
        ]
        if changes:
            self._client.change(changes)

    def _mirror_tensors(
        self,
        parameters: list[tuple[str, torch.Tensor]],
        slots: list[tuple[str, torch.nn.Module, str]],
    ) -> None:
        super()._mirror_tensors(parameters, slots)
        for name, parameter in parameters:
            if self._serve(name, parameter):
                remote_steps.serve(parameter, self._remote[parameter], self._steps)
                if self._looked_up(parameter):
                    remote = self._remote[parameter]
                    remote_rows.leave_on_servers(parameter, remote, self._client, self._owns)
        for name, module, key in slots:
            buffer = module._buffers[key]
            assert buffer is not None
            self._serve(name, buffer)
        for root in self._recorder.roots():
            for module in root.modules():
                if _before_state_dict not in module._state_dict_pre_hooks.values():
                    module.register_state_dict_pre_hook(_before_state_dict)
                _modules_of[module] = weakref.ref(self)

    def _looked_up(self, parameter: torch.Tensor) -> bool:
        """Whether it is an embedding's alone, which wants sparse gradients, or is split."""
        users = [
            module
            for root in self._recorder.roots()
            for module in root.modules()
            if any(one is parameter for one in module._parameters.values())
        ]
        split = self._remote[parameter].split
        return (
            bool(users)
            and self._extended.num_local_replicas == 1
            and all(remote_rows.looks_up(user) for user in users)
            and (split or any(user.sparse for user in users))
        )

    def _serve(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns: whether that is new."""
        if tensor in self._remote:
            return False
        remote = RemoteTensor(self._place(name, tensor.detach()))
        remote.version = version(tensor)
        self._remote[tensor] = remote
        return True


def _before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """A module-level function: it is saved and copied with the module by name alone."""
    reference = _modules_of.get(module)
    modules = None if reference is None else reference()
    if modules is not None and not (has_strategy() and get_replica_context() is not None):
        modules.refresh(module)


def _put_back(slot: BufferSlot, tensor: torch.Tensor) -> None:
    """A forward may have put another tensor in the buffer's place: its values are the buffer's."""
    module, now = slot.module(), slot.tensor()
    if module is None or now is None or now is tensor:
        return
    if (now.shape, now.dtype) == (tensor.shape, tensor.dtype):
        with torch.no_grad():
            tensor.copy_(now)
        module._buffers[slot.key] = tensor
