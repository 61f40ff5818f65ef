"""What `backward()` reduces: each adds the reduction of its own contribution to `.grad`, once.

`reducing_backward` stands in the place of `torch.autograd.backward`. Its end, unlike the callbacks of the autograd
engine, is a place where a replica may wait for another: it is outside the engine, on the thread of the replica, and
after reentrant checkpointing, too.

Before the backward, every `.grad` that is already reduced is set aside; so what is in `.grad` afterwards is this
replica's contribution. The ranks agree on which parameters were used anywhere (`agreement`). The contributions of
those are packed by dtype (`cross_device_ops.packing`), all-reduced, and added to what was set aside. `.grad` then is a
view of the pack: nothing is copied out. A `cross_device_ops` of the program's own adds up the contributions of this
rank's replicas first. With overlap, contributions leave in buckets while the backward runs; the agreement says which
of them count. On a device packs are as large as buckets, and a gradient's memory goes when it is in one: the gradients,
and little more, is what memory has to hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpistrat.arrays import is_on_gpu
from mpistrat.communicators import Reduction
from mpistrat.communicators.transports.accelerator.graph_capture import is_capturing
from mpistrat.context import (
    AnyReplicaContext,
    current_mode,
    in_replica_block,
)
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.errors import CollectiveMismatchError
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.agreement import StepAgreement, StepFacts
from mpistrat.pytorch.gradients.arrivals import Arrivals
from mpistrat.pytorch.gradients.buckets import Buckets, cut
from mpistrat.pytorch.gradients.device_buckets import bucket_bytes, let_go
from mpistrat.pytorch.gradients.overlap import Overlap
from mpistrat.pytorch.gradients.unsynchronized import Unsynchronized
from mpistrat.pytorch.gradients.values import sum_rows, sums_by_custom_ops
from mpistrat.pytorch.gradients.wires import Wires
from mpistrat.pytorch.modules import buffers
from mpistrat.pytorch.modules.registry import Registry
from mpistrat.replicas.torch_modules import ModuleParts
from mpistrat.trace import spans
from mpistrat.wire_formats import ShortFloats

if TYPE_CHECKING:
    from mpistrat.pytorch.shared_parameters.slice_steps import SliceSteps

# Ids of the reducers inside whose `no_sync()` this replica is; its thread inherits the program's.
_not_synchronizing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "not_synchronizing", default=frozenset()
)


_MAY_INTERLEAVE = (
    "Gradients left while backward() ran: if the program communicates inside backward(), and its ranks use different "
    "parameters, have them reduced when it has ended, with CommunicationOptions(overlap=False)"
)


def replica_here() -> tuple[AnyReplicaContext, GradientReducer] | None:
    """The replica that runs here, and the reducer of its strategy; None outside run, or if there is one replica."""
    strategy, context, _ = current_mode()
    if context is None or strategy.num_replicas_in_sync == 1:
        return None
    modules = strategy.extended.modules.made
    return None if modules is None else (context, modules.reducer)


@functools.wraps(hooks.original_backward)
def reducing_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    arguments = (tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
    here = replica_here()
    # A backward inside a backward (reentrant checkpointing) is part of the outer one.
    if here is None or hooks.inside_backward():
        hooks.original_backward(*arguments)
        return
    if create_graph:
        raise RuntimeError(
            "backward(create_graph=True) inside run is not supported: the graph of a reduction over "
            "replicas cannot be built into .grad. Use torch.autograd.grad(..., create_graph=True) for "
            "the inner derivative, and call backward() on the loss that contains it"
        )
    context, reducer = here
    with spans.current.range("backward"), hooks.without_compiled_autograd():
        reducer.backward(context, functools.partial(_backward, arguments))


def _backward(arguments: tuple[Any, ...], weight: float) -> None:
    """The autograd engine's backward, of the tensors times `weight`."""
    tensors, *others = arguments
    if weight != 1.0:
        several = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        with torch.enable_grad():
            tensors = [tensor * weight for tensor in several]
    hooks.original_backward(tensors, *others)


class _Contribution(NamedTuple):
    """What one replica has when its backward has ended.

    Attributes:
        gradients: by slot.
        aside: by slot, the reduced gradients of earlier backwards.
    """

    gradients: list[torch.Tensor | None]
    buffers: buffers.Snapshot
    aside: dict[int, torch.Tensor]


class GradientReducer:
    """Reduces the gradients of a strategy's mirrored parameters.

    Args:
        slice_steps: of parameters that the ranks of a node share; None without `shared_parameters=True`.

    Attributes:
        steps: optimizer steps taken inside `run`; a rank whose count differs has skipped a backward.
        has_reduced: whether all ranks have come to the end of a backward.
        share: what this replica's loss counts in that of all, by the last backward; None before the first.
        optimizers: those that have stepped inside `run` and are still alive, by number in the order of first steps.
        slice_steps: as given.
        arrivals: watches the gradients that come.
    """

    def __init__(
        self, parts: ModuleParts, registry: Registry, slice_steps: SliceSteps | None = None
    ) -> None:
        self._parts, self.registry, self.slice_steps = parts, registry, slice_steps
        self._communicator = parts.group.communicator
        options = parts.ops.options
        short = None if options.wire_dtype is None else ShortFloats(options.wire_dtype)
        self.wires = Wires(options.wire_format or short, registry)
        self._agreement = StepAgreement(self._communicator, registry)
        self._packer = Packer()
        self._sums = parts.gradient_sums or parts.ops.over_ranks
        self.overlap = Overlap(parts, self._packer, self.wires, shares=slice_steps is not None)
        self.arrivals = Arrivals(registry)
        self._unsynchronized = [Unsynchronized(registry) for _ in range(parts.replicas.count)]
        # The last contributions, kept until the next backward takes their memory again. Freed all at once
        # they may be the top of the heap, which glibc returns to the system: page faults were a quarter of
        # a training step.
        self._spent: list[torch.Tensor] = []
        self._warned_of_scale = False
        self.steps = 0
        self.has_reduced = False
        self.share: float | None = None
        self.optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
            weakref.WeakValueDictionary()
        )
        self._numbers = itertools.count()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps for the first time. Every rank takes the same steps."""
        self.optimizers[next(self._numbers)] = optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The work of `Strategy.no_sync`."""
        token = _not_synchronizing.set(_not_synchronizing.get() | {id(self)})
        try:
            yield
        finally:
            _not_synchronizing.reset(token)

    def backward(self, context: AnyReplicaContext, engine: Callable[[float], None]) -> None:
        """Call the autograd engine, and reduce what it has added to `.grad`.

        Called by: every replica, equally often.
        Args:
            context: of the replica.
            engine: is called with what the loss is multiplied by.
        """
        replica, parts = context.local_index, self._parts
        replicas, alone = parts.group.num_replicas_in_sync, parts.replicas.count == 1
        synchronizes = id(self) not in _not_synchronizing.get()
        scale, buckets, in_block = None, None, in_replica_block(context.strategy)
        parameters = self.registry.parameters()
        # What torch has sharded leaves nothing to decide.
        mirrors = any(parameter is not None for parameter in parameters)
        call = f"backward() over {replicas} replicas"
        if in_block:
            _check_mirrors(parameters, call)
            parts.rule.default_to_mean(call)
        if synchronizes and mirrors and parts.rule.decided(call) == "mean":
            scale = 1.0 / replicas
        if synchronizes:
            _check_not_captured(parameters)
        weight = self._weight(in_block)
        self.share = weight / replicas if parts.rule.is_mean else weight
        unsynchronized = self._unsynchronized[replica]
        aside = unsynchronized.set_aside(parameters)
        self._spent = []
        if synchronizes and alone:
            buckets = self.overlap.begin(parameters, scale)
        communicated = True  # perhaps, as long as backward() has not ended
        try:
            calls = self._communicator.contract.calls
            with self.arrivals.watched(replica, parameters, buckets) as check:
                engine(weight)
            own_calls = 0 if buckets is None else buckets.calls
            communicated = self._communicator.contract.calls - calls > own_calls
            if not synchronizes:
                unsynchronized.keep(parameters, aside)
                return
            sent: frozenset[int] = frozenset()
            with self._communicator.raising_together():
                check(in_run=not in_block)
                if buckets is not None:
                    sent = buckets.finish()
            gradients = [None if p is None else p.grad for p in parameters]
            own = _Contribution(gradients, buffers.snapshot(self.registry), aside)
            if alone:
                (reduced,) = self._reduce([own], context, scale, buckets, sent, communicated)
            else:
                reduced = parts.replicas.meet(
                    replica, lambda everyone: self._reduce(everyone, context, scale), own
                )[replica]
        except BaseException as error:
            unsynchronized.undo(parameters, aside)
            if buckets is not None:
                buckets.leave()
                if buckets.calls and communicated and isinstance(error, CollectiveMismatchError):
                    error.args = (f"{error}. {_MAY_INTERLEAVE}",)
            raise
        self._spent = [g for g in gradients if g is not None and g.device.type == "cpu"]
        unsynchronized.clear()
        _install(parameters, reduced, aside)

    def _weight(self, in_block: bool) -> float:
        """What this replica's loss counts in the mean of all: as much as it has of the examples of its loader's step.

        So the gradient of the mean over a replica's own part becomes that of the mean over the global batch.
        """
        extended, is_mean = self._parts.strategy.extended, self._parts.rule.is_mean
        steps, sharded = extended.given_steps, extended.sharded
        examples = steps.begin_backward(weighs=in_block and is_mean)
        sharded.combine(alike=is_mean and (examples if in_block else steps.examples) is None)
        if examples is None:
            return 1.0
        own, of_all = examples.tolist()
        return own * self._parts.group.num_replicas_in_sync / of_all

    def check_may_be_sharded(self, name: str) -> None:
        """Warn if the gradient of parameter `name`, a DTensor, may be scaled otherwise than those of mirrored ones.

        Raises: RuntimeError if this strategy cannot leave it to torch.
        """
        rule = self._parts.rule
        if rule.is_of_loss and not self._warned_of_scale:
            self._warned_of_scale = True
            if self._communicator.rank == 0:
                warnings.warn(
                    f"{rule}, but fully_shard leaves the mean of those of parameter {name}, which is sharded. Make the "
                    'strategy with gradients="mean", and call backward() on the mean over this replica\'s own batch; '
                    'or with gradients="sum", and call set_gradient_divide_factor(1.0) of each fully sharded module',
                    RuntimeWarning,
                    stacklevel=2,
                )
        if self.slice_steps is not None:
            why = "shared_parameters=True keeps one copy per node of whole parameters: leave it out"
        elif self._parts.replicas.count > 1:
            why = f"this rank has {self._parts.replicas.count} replicas: start one rank per replica"
        else:
            return
        raise RuntimeError(
            f"optimizer.step() inside run: parameter {name} is sharded over ranks (a DTensor), but {why}"
        )

    def held_back(self) -> dict[str, Any]:
        """What the wire format has held back on this rank, for `hold_back`."""
        return {
            "ranks": self._communicator.size,
            "parameters": [slot.name for slot in self.registry.slots],
            **self.wires.state(),
            "overlap": self.overlap.state(),
        }

    def hold_back(self, some: Mapping[str, Any], mine: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sum of what the ranks `mine`, any number, have held back; `some` is any rank's.

        Called by: every rank.
        """
        if some["parameters"] != [slot.name for slot in self.registry.slots]:
            if self._communicator.rank == 0:
                warnings.warn(
                    "what ranks have held back of gradients is lost: this program has mirrored other parameters, "
                    "or in another order",
                    UserWarning,
                    stacklevel=2,
                )
            return
        self.wires.load(mine, whole=some["ranks"] != self._communicator.size)
        self.overlap.load(some["overlap"], self.registry.parameters())

    def explain(self) -> str:
        """How gradients are reduced, for people."""
        lines = [str(self._parts.rule), self.overlap.explain(), self.wires.explain()]
        return "\n".join(filter(None, lines))

    def _reduce(
        self,
        everyone: list[Any],
        context: AnyReplicaContext,
        scale: float | None,
        buckets: Buckets | None = None,
        sent: frozenset[int] = frozenset(),
        communicated: bool = False,
    ) -> list[dict[int, torch.Tensor]]:
        """For each local replica the reduced gradients by slot, without those that no replica of any rank has used.

        Args:
            everyone: the `_Contribution` of each local replica.
            scale: multiplied to the sums, or None.
            buckets: have left, with something in the slots `sent`: contributions are what came later.
            communicated: as of `StepAgreement.agree`.
        """
        parts, parameters = self._parts, list[Any](self.registry.parameters())
        contributions: list[list[Any]] = [own.gradients for own in everyone]
        snapshots = [own.buffers for own in everyone]
        with spans.current.range("reduce gradients"):
            if parts.ops.custom is not None:
                with self._communicator.raising_together():
                    contributions = [
                        sums_by_custom_ops(parts.ops.custom, parameters, contributions)
                    ]
            piggybacks = list(parts.piggybacks)
            extended = context.strategy.extended
            sharded = extended.sharded
            facts = StepFacts(context.strategy.runs, self.steps, sharded.count, sharded.first)
            agreed = self._agreement.agree(
                facts, contributions, sent, snapshots, piggybacks, communicated
            )
            sharded.compared(same=agreed.same_batches)
            extended.given_steps.reduced()
            extended.first_step.begin(None)
            self.has_reduced = True
            reduced: dict[int, torch.Tensor] = {}
            if self.slice_steps is not None:
                (own,) = everyone  # parameters are shared by ranks of one replica each
                reduced = self.slice_steps.shared.reduce(
                    agreed.dense, parameters, own.gradients, own.aside, scale
                )
            early = {} if buckets is None else buckets.wait()
            done = {*reduced, *early} - agreed.again

            late: dict[int, torch.Tensor] = {}
            for slots in self._packed([s for s in agreed.dense if s not in done], parameters):
                reduction_of = functools.partial(self._reduction_of, scale, parameters)
                late |= self._sums.all_reduce_packs(
                    self._packer, parameters, slots, contributions, reduction_of
                )
                if len(everyone) == 1 and is_on_gpu(parameters[slots[0]]):
                    # Their memory serves the buckets that come next.
                    for slot in slots:
                        let_go(contributions[0][slot])
                        contributions[0][slot] = parameters[slot].grad = None
            reduced |= late
            for slot in early.keys() & set(agreed.dense):
                reduced[slot] = early[slot].add_(late[slot]) if slot in late else early[slot]
            if len(everyone) == 1:
                self.overlap.end(
                    agreed.dense, parameters, buckets, agreed.communicates, agreed.alike
                )
            for slot in agreed.sparse:
                rows = [gradients[slot] for gradients in contributions]
                total = sum_rows(parts.ops.over_ranks, parameters[slot], rows)
                reduced[slot] = total if scale is None else total * scale
            self.wires.end_backward()
            buffers.average(parts, self.registry.buffers, snapshots, agreed.buffers)
            for piggyback, greatest in zip(piggybacks, agreed.maxima, strict=True):
                piggyback.received(greatest)
            copies = ({slot: t.clone() for slot, t in reduced.items()} for _ in everyone[1:])
            return [reduced, *copies]

    def _packed(self, slots: list[int], parameters: Sequence[Any]) -> list[list[int]]:
        """`slots` in the parts whose gradients are packed, and reduced, one after the other."""
        if not any(is_on_gpu(parameters[slot]) for slot in slots):
            return [slots] if slots else []
        nbytes = bucket_bytes(parameters, slots, self._parts.ops.options.bytes_per_pack)
        return cut(slots[::-1], parameters, nbytes)

    def _reduction_of(
        self, scale: float | None, parameters: Sequence[Any], slots: Sequence[int]
    ) -> Reduction:
        natively = self._communicator.ordered_by_streams and is_on_gpu(parameters[slots[0]])
        label = f"gradients of {len(slots)} parameters"
        return self.wires.reduction(label, scale, slots, natively=natively)


def _check_mirrors(parameters: Sequence[Any], call: str) -> None:
    """Raises: RuntimeError where nothing is mirrored, and torch has no group by which the program may do so itself."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not parameters and not has_group:
        raise RuntimeError(
            f"{call} inside replica(), where no module is mirrored: each rank would train a model of its own. Call "
            "strategy.prepare(model) once the model is built, on every rank; or torch.autograd.grad, if no gradients "
            "are to be combined"
        )


def _check_not_captured(parameters: Sequence[torch.Tensor | None]) -> None:
    """Raises: RuntimeError while a graph of the parameters' device is captured."""
    some = next((parameter for parameter in parameters if parameter is not None), None)
    if some is not None and is_capturing(some):
        raise RuntimeError(
            "backward() inside run was called while a graph of the device is captured: the ranks agree on the host on "
            "what they reduce, which a replay would leave out. Capture the model alone, by "
            'torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead"), and call backward() outside; '
            "or capture backward() inside strategy.no_sync(), and give the gradients to all_reduce after each replay"
        )


def install() -> None:
    """Have backwards inside `run` reduce gradients."""
    hooks.replace_backward(reducing_backward)


def _install(
    parameters: Sequence[torch.Tensor | None],
    reduced: Mapping[int, torch.Tensor],
    aside: Mapping[int, torch.Tensor],
) -> None:
    """Put the reduced gradients into `.grad`, added to those of earlier backwards in `aside`."""
    totals, addends = [], []
    for slot, parameter in enumerate(parameters):
        if parameter is None:
            continue
        before, added = aside.get(slot), reduced.get(slot)
        if before is None or added is None:
            parameter.grad = before if added is None else added
        elif before.is_sparse or added.is_sparse:
            parameter.grad = before + added
        else:
            parameter.grad = before
            totals.append(before)
            addends.append(added)
    if totals:
        torch._foreach_add_(totals, addends)
