"""Torch modules that have their parameters and buffers on servers, on a rank that makes the modules itself.

A run begins by pulling the servers' values. An optimizer's step sends the gradients to the servers (`remote_steps`).
When a run ends, the servers add the amounts that it has added to buffers, such as batch norm's statistics, as in
TensorFlow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpistrat.parameter_server.client.client import Client
from mpistrat.parameter_server.modules.remote_rows import leave_on_servers, looks_up
from mpistrat.parameter_server.modules.remote_steps import RemoteSteps, has_remote_parameters
from mpistrat.parameter_server.modules.remote_tensors import RemoteTensors
from mpistrat.parameter_server.protocol.messages import Address
from mpistrat.parameter_server.protocol.staleness import WorkerClock
from mpistrat.pytorch import hooks
from mpistrat.pytorch.mirroring import Mirroring
from mpistrat.pytorch.modules.registry import NewTensors
from mpistrat.pytorch.modules.strategy_modules import StrategyModules
from mpistrat.replicas.torch_modules import ModuleParts


class RemoteModules(StrategyModules):
    """The torch modules that a chief, or a worker without a chief, makes in the scope.

    Their parameters and buffers are on the servers, and equal on all replicas of this rank.

    Args:
        place: makes or finds the arrays of a tensor (by name) on the servers and returns their addresses; every worker
            calls it in the same order. The first values come from the rank with `owns=True`.
        owns: whether the servers take the values that this rank writes outside optimizers' steps. True on one rank.
        clock: this worker's clock; None on a chief.
    Attributes:
        recorder: knows the modules that this rank has made in the scope.
        tensors: the modules' parameters and buffers on the servers.
    """

    def __init__(
        self,
        parts: ModuleParts,
        client: Client,
        place: Callable[[str, Tensor], Sequence[Address]],
        owns: bool,
        clock: WorkerClock | None,
    ) -> None:
        self._mirroring = Mirroring(parts)
        super().__init__(parts, self._mirroring.registry, self._mirroring.reducer)
        self._place = place
        self.recorder = self._mirroring.recorder
        self.tensors = RemoteTensors(client, owns)
        self.steps = RemoteSteps(self.tensors, clock, self._rule, itertools.count().__next__)

    def _rule(self) -> str:
        workers = self.parts.strategy.workers_combined
        if workers == 1:
            return "sum"
        return self.parts.rule.decided(f"step() over {workers} workers")

    def before_run(self) -> None:
        """Place new tensors on the servers, and pull the servers' values into all tensors.

        If this rank owns the tensors, first send those that the program has written.
        """
        self.mirror_new()
        self.tensors.begin_run(self.registry)

    def after_run(self) -> None:
        self.tensors.end_run()

    def stop_recording(self, failed: bool) -> None:
        if not failed:
            self.before_run()

    def after_restore(self, objects: Iterable[Any]) -> None:
        """Send restored parameters, buffers and optimizer state to the servers; ranks with `owns=False` pull.

        Called by: every worker, with the same objects in the same order, because that order numbers the optimizers.
        """
        self.before_run()
        for loaded in objects:
            if isinstance(loaded, Optimizer) and has_remote_parameters(loaded):
                self.steps.of(loaded)

    def mirror(self, module: Any) -> None:
        self._place_new(self._mirroring.mirror(module))
        self.before_run()

    def mirror_new(self) -> None:
        """Place the parameters and buffers of new modules on the servers."""
        new = self._mirroring.mirror_new()
        if new.parameters or new.buffers:
            self._place_new(new)

    def refresh(self, module: nn.Module) -> None:
        """Pull the servers' values into the parameters and buffers of this module alone, without its submodules.

        Called by: torch, before `state_dict()`, pickling, saving and copying.
        """
        self._mirroring.average_written_buffers(module)
        tensors = [*module._parameters.values(), *module._buffers.values()]
        self.tensors.sync(self.tensors.held(tensors))

    def _place_new(self, new: NewTensors) -> None:
        tensors = self.tensors
        for name, parameter in new.parameters:
            if parameter not in tensors:
                remote = tensors.add(parameter, self._place(name, parameter.detach()))
                self.steps.add(parameter, remote)
                if self._is_looked_up(parameter, remote.split):
                    leave_on_servers(parameter, remote)
        for name, _, _, buffer in new.buffers:
            if buffer not in tensors:
                tensors.add(buffer, self._place(name, buffer.detach()))
        for module in self._recorded():
            hooks.before_copy(module, self.refresh)

    def _recorded(self) -> Iterator[nn.Module]:
        for root in self.recorder.roots():
            yield from root.modules()

    def _is_looked_up(self, parameter: Tensor, split: bool) -> bool:
        """Whether to leave the parameter on servers, and pull only the rows that a forward looks up.

        True if only embeddings without `max_norm` use it, and it is split or an embedding has `sparse=True`. False if
        this rank has several replicas.
        """
        if self.parts.group.num_local_replicas > 1:
            return False
        users = []
        for module in self._recorded():
            if parameter in {*module._parameters.values()}:
                users.append(module)
        if not users or not all(looks_up(user) for user in users):
            return False
        return split or any(user.sparse for user in users)
