"""Torch modules whose parameters and buffers are on servers, on a rank that makes them itself.

A run begins with what the servers have then; an optimizer's step sends its gradients there (`remote_steps`). What a run
adds to buffers, such as batch norm's statistics, is added on the servers when it ends, as TensorFlow does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

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
    """Modules that a coordinator's chief, or a worker without a chief, makes: equal on its replicas, and on servers.

    Args:
        place: finds a tensor of that name a place on the servers, once on each rank in the same order; the first
            values are those of the rank that `owns`.
        owns: as of `RemoteTensor`.
        clock: this worker's; None where nothing is combined over workers.
    Attributes:
        recorder: the modules.
        tensors: their parameters and buffers.
        steps: of their optimizers.
    """

    def __init__(
        self,
        parts: ModuleParts,
        client: Client,
        place: Callable[[str, torch.Tensor], Sequence[Address]],
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
        return "sum" if workers == 1 else self.parts.rule.decided(f"step() over {workers} workers")

    def before_run(self) -> None:
        """Give servers what is new, send what this rank has written if it owns that, and pull everything."""
        self.mirror_new()
        self.tensors.begin_run(self.registry)

    def after_run(self) -> None:
        self.tensors.end_run()

    def stop_recording(self, failed: bool) -> None:
        if not failed:
            self.before_run()

    def after_restore(self, objects: Iterable[Any]) -> None:
        """Now, before other workers train: the servers get what this rank has, if it owns that.

        Called by: every worker, with the same objects, for optimizers have numbers in the order in which they come.
        """
        self.before_run()
        for loaded in objects:
            if isinstance(loaded, torch.optim.Optimizer) and has_remote_parameters(loaded):
                self.steps.of(loaded)

    def mirror(self, module: Any) -> None:
        self._place_new(self._mirroring.mirror(module))
        self.before_run()

    def mirror_new(self) -> None:
        """Give servers the parameters and buffers that are new."""
        new = self._mirroring.mirror_new()
        if new.parameters or new.buffers:
            self._place_new(new)

    def refresh(self, module: torch.nn.Module) -> None:
        """Let the module's own parameters and buffers be what the servers have now."""
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

    def _recorded(self) -> Iterator[torch.nn.Module]:
        return itertools.chain.from_iterable(root.modules() for root in self.recorder.roots())

    def _is_looked_up(self, parameter: torch.Tensor, split: bool) -> bool:
        """Whether embeddings alone use the parameter, and it is split or one of them wants sparse gradients."""
        if self.parts.group.num_local_replicas > 1:
            return False
        users = [
            module for module in self._recorded() if parameter in {*module._parameters.values()}
        ]
        if {*map(looks_up, users)} != {True}:
            return False
        return split or any(user.sparse for user in users)
