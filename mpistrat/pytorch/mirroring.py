"""Torch modules as mirrored variables: their values are equal on every replica from the end of `scope()` on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from mpistrat import arrays
from mpistrat.communicators import reducing
from mpistrat.context import require_cross_replica
from mpistrat.cross_device_ops import packing
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch import hooks, optimizers, sync_batch_norm, virtual_replicas
from mpistrat.pytorch.gradients import reducer
from mpistrat.pytorch.modules import buffers, placing
from mpistrat.pytorch.modules.buffer_rules import rule_of
from mpistrat.pytorch.modules.data_parallel import check_not_wrapped
from mpistrat.pytorch.modules.preparing import first_difference, of_all
from mpistrat.pytorch.modules.recording import Recorder
from mpistrat.pytorch.modules.registry import NewTensors, Registry, tensors_in
from mpistrat.pytorch.modules.strategy_modules import StrategyModules
from mpistrat.pytorch.shared_parameters.shared_parameters import SharedParameters
from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps
from mpistrat.pytorch.watch.watch import Watch
from mpistrat.replicas.torch_modules import ModuleParts
from mpistrat.trace import spans

_BYTES_PER_BROADCAST = 1 << 27


class Mirroring(StrategyModules):
    """Keeps the parameters and buffers of a strategy's torch modules equal on all replicas.

    The strategy calls it at the end of `scope()`, before each `run`, and for `mirror` and `prepare`.

    Args:
        parts: the strategy's communicator, replicas, options and rule for gradients.
        shared_parameters: whether the ranks of a node keep one copy of the parameters.
        watches: whether the ranks compare their modules and optimizers in training.

    Attributes: recorder: the modules that this rank has made in the strategy's scope.
    """

    def __init__(
        self, parts: ModuleParts, shared_parameters: bool = False, watches: bool = False
    ) -> None:
        self._communicator = parts.group.communicator
        self._is_alone = parts.group.num_replicas_in_sync == 1
        several = self._communicator.size > 1
        self._watches = watches and several and not parts.replicas.records_steps
        self._shared: SharedParameters | None = None
        slice_steps: SliceSteps | None = None
        if shared_parameters and not self._is_alone:
            self._shared = SharedParameters(self._communicator)
            slice_steps = SliceSteps(self._shared)
        registry = Registry()
        super().__init__(parts, registry, reducer.GradientReducer(parts, registry, slice_steps))
        made_in_run = self.reducer.arrivals.made_in_run
        self.recorder = Recorder(parts.strategy, registry.__contains__, made_in_run)
        if not self._is_alone:
            reducer.install()
            optimizers.install()
            sync_batch_norm.install()
        if parts.replicas.count > 1:
            virtual_replicas.install(parts.replicas, registry, self.recorder.roots)

    def mirror_new(self) -> NewTensors:
        """Mirror all tensors of recorded modules that are not mirrored yet: rank 0's values go to all ranks.

        These are tensors of new modules, materialized lazy parameters, and parameters that the program has replaced.
        With shared parameters, parameters that have got other memory are mirrored again.
        Called by: every rank, at the end of `scope()` and before each `run`. Collective if there is such a tensor.
        Returns: the tensors that were mirrored now; both lists are empty if there were none.
        """
        new = NewTensors([], [])
        if self._shared is not None:
            new.parameters.extend(self._shared.moved(self.registry))
        if self.recorder.changed:
            self.recorder.changed = False
            roots = self.recorder.roots()
            self._place(roots)
            self._collect(roots, self.registry.new_in, new)
        if any(new):
            self._mirror_tensors(new)
        return new

    before_run = mirror_new

    def has_made(self, module: Module) -> bool:
        return self.recorder.knows(module)

    def stop_recording(self, failed: bool) -> None:
        if not failed:
            self.mirror_new()

    def mirror(self, module: Any) -> NewTensors:
        """Mirror `module` now: rank 0's values go to all ranks. Does the work of `Strategy.mirror`. Collective.

        Tensors that are mirrored already get rank 0's values again.
        Args: module: a module, a parameter, or an iterable of them.
        Returns: the tensors that were mirrored; not DTensors, and not lazy or "meta" tensors of a module.
        Raises:
            TypeError: `module` is, or contains, another value.
            ValueError: `module` is the result of an operation, or a module that contains a `DistributedDataParallel` or
                `FullyShardedDataParallel`.
            CollectiveMismatchError: names, shapes or dtypes differ between ranks.
        """
        require_cross_replica(self.parts.strategy, "mirror")
        values = list(_flatten(module))
        modules = [value for value in values if isinstance(value, Module)]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        for root in modules:
            if not self._is_alone:
                check_not_wrapped(root, self._communicator.rank)
            self.recorder.record(root)
        self._place(modules, tensors)
        new = NewTensors([], [])
        self._collect(modules, tensors_in, new)
        for i, tensor in enumerate(tensors):
            if not arrays.is_sharded(tensor):
                new.parameters.append((f"parameter {i}", tensor))
        self._mirror_tensors(new)
        return new

    def average_written_buffers(self, module: Module) -> None:
        """Average the own buffers of `module` over all replicas, in place, if a replica has written one of them.

        Writes count since the last average; each reduction of gradients makes one. Buffers of submodules are left
        alone. If nothing was written here, this rank makes no collective.
        Called by: `module.state_dict()`, on every rank.   Context: cross-replica or top level.
        """
        if self._is_alone:
            return
        found = (self.registry.buffer(module, key) for key in module._buffers)
        slots = [slot for slot in found if slot is not None and slot.rule != "local"]
        if any(slot.changed(slot.tensor()) for slot in slots):
            for slot in slots:
                slot.begin_step()
            copies = virtual_replicas.copies_of_buffers(self.parts.replicas, slots)
            snapshots = [[(tensor, 1) for tensor in of_replica] for of_replica in copies]
            label = "state_dict() averages buffers written since the last backward(): call it on every rank"
            buffers.reduce(self.parts, slots, snapshots, buffers.flags_of(snapshots), label)

    def after_loader(self) -> None:
        """Average all buffers that forwards have written since the last backward, so that a rank alone can save them.

        The ranks also compare the samples of the watch.
        Called by: every rank, when a loader inside `Strategy.replica()` ends. Collective if buffers are mirrored.
        """
        if self.parts.watch is not None:
            self.parts.watch.after_loader()
        slots = self.registry.buffers
        if self._is_alone or not slots:
            return
        snapshots = [buffers.snapshot(self.registry)]
        label = "buffers at the end of a loader"
        words = np.concatenate([self.parts.watched, buffers.flags_of(snapshots)])
        self._communicator.all_reduce(words, reducing("max", label))
        watched, flags = np.split(words, [len(self.parts.watched)])
        buffers.reduce(self.parts, slots, snapshots, flags, label)
        if watched.any():
            self.parts.watch.received(watched)

    def _place(self, modules: Sequence[Module], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Move `modules` and `tensors` to the strategy's device, with the optimizers' state of moved parameters.

        Does nothing if the strategy names no device for modules.
        Args: tensors: parameters that are in no module.
        Raises:
            NotImplementedError: this rank has several devices that are not the CPU.
            RuntimeError: a parameter cannot move. After either error the other ranks raise CollectiveMismatchError.
        """
        name = self.parts.replicas.device_of_modules
        if name is None:
            return
        device = torch.device("cpu" if name.startswith("cpu") else name)
        with self._communicator.raising_together():
            self._check_one_device(modules, tensors)
            moved = placing.place_tensors(tensors, device)
            for module in modules:
                moved += placing.place(module, device)
        placing.bring_states(moved)
        if not self.parts.replicas.records_steps:
            for module in modules:
                placing.compute_there(module, device)

    def _check_one_device(self, modules: Sequence[Module], tensors: Sequence[torch.Tensor]) -> None:
        group = self.parts.group
        devices = group.worker_devices
        are_cpus = all(device.startswith("cpu") for device in devices)
        if self.parts.replicas.count == 1 or are_cpus:
            return
        found = [*tensors]
        for module in modules:
            found += [*module.parameters(), *module.buffers()]
        if found:
            raise NotImplementedError(
                f"torch modules take one rank per device, and rank {self._communicator.rank} has {len(devices)} "
                f"devices, {list(devices)}: start a rank for each, mpirun -n {group.num_replicas_in_sync} python "
                "train.py (or srun, with --ntasks-per-node), and give the strategy no devices, or one. Only arrays and "
                "mpistrat.Variables may have several devices in one rank"
            )

    def _collect(
        self, roots: Iterable[Module], tensors_of: Callable[[Module], NewTensors], new: NewTensors
    ) -> None:
        """Add the tensors of modules to `new`, except lazy and "meta" tensors: the next `mirror_new` looks again.

        Args:
            roots: the modules, with their submodules.
            tensors_of: returns the tensors of a module: all, or only tensors that are not mirrored yet.
            new: the lists that grow.
        """
        for root in roots:
            _reshard(root)
            found = tensors_of(root)
            parameters = [entry for entry in found.parameters if not _is_pending(entry[-1])]
            known = [entry for entry in found.buffers if not _is_pending(entry[-1])]
            new.parameters.extend(parameters)
            new.buffers.extend(known)
            # The next run looks again, until no tensor is pending.
            self.recorder.changed |= (parameters, known) != found

    def _mirror_tensors(self, new: NewTensors) -> None:
        """Compare tensors over the ranks, copy rank 0's values into them, and register them as mirrored. Collective.

        Tensors that the program has dropped on all ranks are forgotten.
        Raises: on all ranks, CollectiveMismatchError if names, shapes or dtypes differ, and ValueError if elements of a
            tensor share memory.
        """
        with spans.current.range("mirror"):
            if self._communicator.size > 1:
                tensors = [*new.parameters]
                for name, _, _, buffer in new.buffers:
                    tensors.append((name, buffer))
                self._check_alike(tensors)
                self._broadcast([tensor.detach() for _, tensor in tensors])
            self._drop_dead()
            for name, parameter in new.parameters:
                if parameter not in self.registry:
                    self.registry.add_parameter(name, parameter)
                    if not self._is_alone:
                        self.reducer.arrivals.guard(parameter)
            for name, module, key, buffer in new.buffers:
                slot = self.registry.buffer(module, key)
                if slot is None:
                    slot = self.registry.add_buffer(name, module, key, rule_of(module, key))
                    hooks.before_state_dict(module, self.average_written_buffers)
                slot.settle([buffer])
            if self._shared is not None:
                parameters = [parameter for _, parameter in new.parameters]
                self._shared.share(parameters, self.registry)
            if self._watches and self.parts.watch is None:
                # Here all ranks are together; a rank alone may have imported torch before.
                self.parts.watch = Watch(self, self.recorder.roots)
            if self.parts.watch is not None:
                self.parts.watch.facts.note_versions()

    def _check_alike(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Check that names, shapes and dtypes are equal on all ranks, and that no elements share memory. Collective.

        Args: tensors: pairs of a name and a tensor.
        Raises: on all ranks, CollectiveMismatchError or ValueError.
        """
        lines = {}
        for number, (name, tensor) in enumerate(tensors):
            layout = f"{tensor.dtype}{list(tensor.shape)}{_expansion(tensor)}"
            lines[number] = f"{name}: {layout}"
        of_ranks = of_all(self._communicator, lines, "mirrored parameters")
        if of_ranks:
            number, difference = first_difference(of_ranks)
            raise CollectiveMismatchError(
                f"the ranks' models differ, so they cannot be mirrored: parameter or buffer {number} is {difference}. "
                "Build the same modules, in the same order, on every rank"
            )
        for name, tensor in tensors:
            if _expansion(tensor):
                raise ValueError(
                    f"the elements of {name!r} share memory, as after expand(), so rank 0's values cannot be "
                    "copied into it. Give the module a tensor with memory of its own: tensor.clone()"
                )

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Copy rank 0's values into `tensors` on all ranks, in messages of about 128 MiB from the host. Collective."""
        is_root = self._communicator.rank == 0
        as_bytes = [torch.empty(t.nbytes, dtype=torch.uint8, device="meta") for t in tensors]
        end = 0
        for group in packing.group_by_size(as_bytes, _BYTES_PER_BROADCAST):
            start = end
            end += len(group)
            together = tensors[start:end]
            if is_root:
                message = packing.concatenated([_bytes_of(tensor) for tensor in together])
            else:
                nbytes = sum(part.nbytes for part in group)
                message = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._communicator.broadcast(message, label="mirrored parameters")
            if not is_root:
                with torch.no_grad():
                    for tensor, piece in zip(together, packing.unpack(message, group), strict=True):
                        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def _drop_dead(self) -> None:
        """Forget the parameters and buffers that the program has dropped on every rank. Collective.

        The remaining slots get new numbers, so layouts of packs and buckets are forgotten, too.
        """
        alive = np.array(self.registry.alive(), np.uint8)
        if alive.size:
            self._communicator.all_reduce(alive, reducing("max", "parameters still in use"))
            if not alive.all():
                self.registry.keep(alive.tolist())
                self.reducer.overlap.forget()
                self.reducer.packer.forget()


def _flatten(value: Any) -> Iterator[Module | torch.Tensor]:
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        raise ValueError(
            f"mirror takes parameters, got the result of an operation, {value.grad_fn!r:.60}"
        )
    if isinstance(value, (Module, torch.Tensor)):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _flatten(item)
    else:
        raise TypeError(f"mirror takes a torch module or parameters, got {value!r:.60}")


def _reshard(root: Module) -> None:
    """Have the `fully_shard` modules in `root` hold DTensors: after a forward some hold whole, plain parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in root.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def _is_pending(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no values yet: a lazy tensor before the module's first forward, or one on the device "meta".

    Mirroring skips such a tensor, and looks at its module again in the next run.
    """
    return is_lazy(tensor) or tensor.is_meta


def _expansion(tensor: torch.Tensor) -> str:
    """Return a word for a tensor with elements that share memory, as after `expand()`: torch copies nothing into it."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1 and not stride:
            return ", expanded"
    return ""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
