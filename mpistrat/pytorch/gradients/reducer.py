"""What `backward()` reduces: each adds the reduction of its own contribution to `.grad`, once.

`reducing_backward` stands in the place of `torch.autograd.backward`. Its end, unlike the callbacks of the autograd
engine, is a place where a replica may wait for another: it is outside the engine, on the thread of the replica, and
after reentrant checkpointing, too.

Before the backward, every `.grad` that is already reduced is set aside; so what is in `.grad` afterwards is this
replica's contribution. The ranks agree on which parameters were used anywhere (`agreement`). The contributions of those
are packed by dtype (`cross_device_ops.packing`), and all-reduced. `.grad` then is a view of the pack: nothing is copied
out. Where something was set aside, `.grad` is that again, and the sum is added to it. A `cross_device_ops` of the
program's own adds up the contributions of this rank's replicas first. With overlap, contributions leave in buckets
while the backward runs; the agreement says which of them count. On a device packs are as large as buckets, and a
gradient's memory goes when it is in one: the gradients, and little more, is what memory has to hold.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpistrat.communicators.graph_capture import is_capturing
from mpistrat.context import AnyReplicaContext, per_thread
from mpistrat.cross_device_ops.packing import Packer
from mpistrat.errors import CollectiveMismatchError
from mpistrat.liveness.ending import early_signals
from mpistrat.machine.notices import warn_on_first_rank
from mpistrat.pytorch import hooks
from mpistrat.pytorch.gradients.agreement import AgreedGradients, ReplicaBackward, StepAgreement
from mpistrat.pytorch.gradients.arrivals import Arrivals
from mpistrat.pytorch.gradients.dense_sums import DenseSums
from mpistrat.pytorch.gradients.earlier_gradients import EarlierGradients
from mpistrat.pytorch.gradients.overlap import Overlap
from mpistrat.pytorch.gradients.values import sum_by_custom_ops, sum_sparse
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


_PARAMETER = operator.methodcaller("reference")  # of a slot
_IS_THERE = functools.partial(operator.is_not, None)
# None also of a parameter that is gone.
_GRADIENT = itertools.repeat("grad"), itertools.repeat(None)

_MAY_INTERLEAVE = (
    "Gradients left while backward() ran: if the program communicates inside backward(), and its ranks use different "
    "parameters, have them reduced when it has ended, with CommunicationOptions(overlap=False)"
)


def replica_here() -> tuple[AnyReplicaContext, GradientReducer] | None:
    """The replica that runs here, and the reducer of its strategy; None outside run, or if there is one replica."""
    if not per_thread.modes or (context := per_thread.modes[-1].replica_context) is None:
        return None  # below all modes is the default strategy, of one replica
    modules = per_thread.modes[-1].strategy.extended.modules.made
    if modules is None or modules.reducer.count == 1:
        return None
    return context, modules.reducer


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
    if here is None or hooks.graph_task() >= 0:
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
        reducer.backward(context, *arguments)


def _times(weight: float, tensors: Any) -> list[torch.Tensor]:
    several = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    with torch.enable_grad():
        return [tensor * weight for tensor in several]


class GradientReducer:
    """Reduces the gradients of a strategy's mirrored parameters.

    Args:
        slice_steps: of parameters that the ranks of a node share; None without `shared_parameters=True`.

    Attributes:
        count: of replicas, on all ranks.
        steps: optimizer steps taken inside `run`; a rank whose count differs has skipped a backward.
        has_reduced: whether all ranks have come to the end of a backward.
        share: what this replica's loss counts in that of all, by the last backward; None before the first.
        optimizers: those that have stepped inside `run` and are still alive, by number in the order of first steps.
        numbers: those of the next ones; equal on all ranks.
        slice_steps: as given.
        arrivals: watches the gradients that come.
        packer: makes the packs of gradients.
    """

    def __init__(
        self, parts: ModuleParts, registry: Registry, slice_steps: SliceSteps | None = None
    ) -> None:
        self._parts, self.registry, self.slice_steps = parts, registry, slice_steps
        self._communicator = parts.group.communicator
        self._raising_together = self._communicator.raising_together()
        self.count = parts.group.num_replicas_in_sync
        options = parts.ops.options
        short = None if options.wire_dtype is None else ShortFloats(options.wire_dtype)
        self.wires = Wires(options.wire_format or short, registry)
        self._agreement = StepAgreement(parts, registry)
        self.packer = Packer()
        self._sums = DenseSums(parts, self.packer, self.wires)
        self.overlap = Overlap(parts, self.packer, self.wires, shares=slice_steps is not None)
        self.arrivals = Arrivals(registry)
        self._earlier = [EarlierGradients(registry) for _ in range(parts.replicas.count)]
        self._warned_of_scale = False
        self.steps = 0
        self.has_reduced = False
        self.share: float | None = None
        self.optimizers = weakref.WeakValueDictionary[int, torch.optim.Optimizer]()
        self.numbers = itertools.count()

    @functools.cached_property
    def _extended(self) -> Any:  # which this is a part of
        return self._parts.strategy.extended

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The work of `Strategy.no_sync`."""
        token = _not_synchronizing.set(_not_synchronizing.get() | {id(self)})
        try:
            yield
        finally:
            _not_synchronizing.reset(token)

    def backward(self, context: AnyReplicaContext, tensors: Any, *arguments: Any) -> None:
        """Call the autograd engine, and reduce what it has added to `.grad`.

        Called by: every replica, equally often.
        Args:
            context: of the replica.
            tensors, arguments: of torch's `backward`.
        """
        step, reduced = self._set_aside(context.local_index), None
        replicas, replica = self._parts.replicas, step.replica
        try:
            self._run(step, tensors, *arguments)
            if step.synchronizes and replicas.count == 1:
                (reduced,) = self._agree_and_reduce([step])
            elif step.synchronizes:
                reduced = replicas.meet(replica, self._agree_and_reduce, step)[replica]
        except BaseException as error:
            self._undo(step, error)
            raise
        self._earlier[replica].put_back(step.parameters, step.earlier, reduced)

    def _set_aside(self, replica: int) -> ReplicaBackward:
        """Take what is reduced already out of every `.grad`."""
        rule, call = self._parts.rule, f"backward() over {self.count} replicas"
        parameters = [*map(_PARAMETER, self.registry.slots)]
        in_block, scale = per_thread.modes[-1].in_block, None
        synchronizes = id(self) not in _not_synchronizing.get()
        if in_block:
            _check_mirrors(parameters, call)
            rule.default_to_mean(call)
        some = next(filter(_IS_THERE, parameters), None)
        if synchronizes and some is not None:  # what torch has sharded leaves nothing to decide
            scale = 1.0 / self.count if (rule.chosen or rule.decided(call)) == "mean" else None
            if not some.is_cpu:
                _check_not_captured(some)
        weight = self._weight(in_block)
        earlier, self._sums.spent = self._earlier[replica].set_aside(parameters), []
        may_leave = synchronizes and self.overlap.may_come
        buckets = self.overlap.begin(parameters, scale) if may_leave else None
        return ReplicaBackward(
            replica, parameters, in_block, synchronizes, scale, weight, earlier, buckets
        )

    def _run(self, step: ReplicaBackward, tensors: Any, *arguments: Any) -> None:
        """Have the engine compute what the replica contributes."""
        contract, buckets = self._communicator.contract, step.buckets
        calls = contract.calls
        with self.arrivals.watched(step) as check:
            loss = tensors if step.weight == 1.0 else _times(step.weight, tensors)
            hooks.original_backward(loss, *arguments)
        step.communicated = contract.calls > calls + (0 if buckets is None else buckets.calls)
        if step.synchronizes:
            with self._raising_together:
                check()
                step.sent = frozenset() if buckets is None else buckets.finish()
            step.gradients = [*map(getattr, step.parameters, *_GRADIENT)]
            step.buffers = buffers.snapshot(self.registry) if self.registry.buffers else []

    def _agree_and_reduce(self, steps: list[ReplicaBackward]) -> list[dict[int, torch.Tensor]]:
        """For each replica of this rank by slot the reduced gradients, without those that no replica has used."""
        with spans.current.range("reduce gradients"):
            if self._parts.ops.custom is not None:
                with self._raising_together:
                    sum_by_custom_ops(self._parts.ops.custom, steps)
            agreed = self._agreement.agree(steps, self._extended, self.steps)
            if early_signals.kept or not self.has_reduced:
                self._extended.first_step_notice.at_step(None)
            self.has_reduced = True
            reduced = [self._reduce(steps, agreed)]
            for _ in steps[1:]:
                reduced.append({slot: total.clone() for slot, total in reduced[0].items()})
            return reduced

    def _weight(self, in_block: bool) -> float:
        """What this replica's loss counts in the mean of all: as much as it has of the examples of its loader's step.

        So the gradient of the mean over a replica's own part becomes that of the mean over the global batch.
        """
        steps, sharded = self._extended.given_steps, self._extended.sharded
        is_mean, weight = self._parts.rule.chosen == "mean", 1.0
        weighs, examples = in_block and is_mean, None
        if weighs or steps.iterations:
            examples = steps.begin_backward(weighs=weighs)
        if sharded.cuts:
            sharded.combine(alike=is_mean and (examples if in_block else steps.examples) is None)
        if examples is not None:
            of_replica, of_all = examples.tolist()
            weight = of_replica * self.count / of_all
        self.share = weight / self.count if is_mean else weight
        return weight

    def check_may_be_sharded(self, name: str) -> None:
        """Warn if the gradient of parameter `name`, a DTensor, may be scaled otherwise than those of mirrored ones.

        Raises: RuntimeError if this strategy cannot leave it to torch.
        """
        rule = self._parts.rule
        if rule.is_of_loss and not self._warned_of_scale:
            self._warned_of_scale = True
            warn_on_first_rank(
                self._communicator.rank,
                f"{rule}, but fully_shard leaves the mean of those of parameter {name}, which is sharded. Make the "
                'strategy with gradients="mean", and call backward() on the mean over this replica\'s own batch; '
                'or with gradients="sum", and call set_gradient_divide_factor(1.0) of each fully sharded module',
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

    def hold_back(self, some: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the sum of `states`, any number, that ranks have held back; `some` is any rank's.

        Called by: every rank.
        """
        if some["parameters"] != [slot.name for slot in self.registry.slots]:
            warn_on_first_rank(
                self._communicator.rank,
                "what ranks have held back of gradients is lost: this program has mirrored other parameters, "
                "or in another order",
                UserWarning,
            )
            return
        self.wires.load(states, whole=some["ranks"] != self._communicator.size)
        self.overlap.load(some["overlap"], self.registry.parameters())

    def explain(self) -> str:
        """How gradients are reduced, for people."""
        lines = [str(self._parts.rule), self.overlap.explain(), self.wires.explain()]
        return "\n".join(filter(None, lines))

    def _reduce(
        self, steps: list[ReplicaBackward], agreed: AgreedGradients
    ) -> dict[int, torch.Tensor]:
        """Sum up the gradients that some replica has used, by slot, and average buffers."""
        step, buckets = steps[0], steps[0].buckets
        reduced: dict[int, torch.Tensor] = {}
        if self.slice_steps is not None:  # parameters are shared by ranks of one replica each
            reduced = self.slice_steps.shared.reduce(
                agreed.dense, step.parameters, step.gradients, step.earlier, step.scale
            )
        early = {} if buckets is None else buckets.wait()
        # All that has not left in a bucket; and what has got something after it had left.
        slots = sorted({*agreed.dense} - ({*reduced, *early} - agreed.again))
        if slots:
            following = self._communicator.contract.following
            with following() if agreed.may_follow else contextlib.nullcontext():
                reduced |= self._sums.of(slots, steps)
        for slot in early.keys() & set(agreed.dense):
            late = reduced.get(slot)
            reduced[slot] = early[slot] if late is None else early[slot].add_(late)
        if self.overlap.may_come:
            self.overlap.end(step, agreed)
        if agreed.sparse:
            reduced |= sum_sparse(self._parts.ops.over_ranks, agreed.sparse, steps)
        if self.wires.has_format:
            self.wires.end_backward()
        if self.registry.buffers:
            snapshots = [backward.buffers for backward in steps]
            flags = buffers.to_average(agreed.buffers)
            buffers.average(self._parts, self.registry.buffers, snapshots, flags)
        for piggyback, greatest in agreed.maxima:
            piggyback.received(greatest)
        return reduced

    def _undo(self, step: ReplicaBackward, error: BaseException) -> None:
        """The backward has failed for `error`."""
        self._earlier[step.replica].undo(step.parameters, step.earlier)
        buckets, step.buckets = step.buckets, None  # the error keeps the step
        if buckets is None:
            return
        buckets.leave()
        if step.communicated and buckets.calls and isinstance(error, CollectiveMismatchError):
            error.args = (f"{error}. {_MAY_INTERLEAVE}",)


def _check_mirrors(parameters: Sequence[Any], call: str) -> None:
    """Raises: RuntimeError where nothing is mirrored, and torch has no group by which the program may do so itself."""
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not parameters and not has_group:
        raise RuntimeError(
            f"{call} inside replica(), where no module is mirrored: each rank would train a model of its own. Call "
            "strategy.prepare(model) once the model is built, on every rank; or torch.autograd.grad, if no gradients "
            "are to be combined"
        )


def _check_not_captured(parameter: torch.Tensor) -> None:
    """Raises: RuntimeError while a graph of the parameter's device is captured."""
    if is_capturing(parameter):
        raise RuntimeError(
            "backward() inside run was called while a graph of the device is captured: the ranks agree on the host on "
            "what they reduce, which a replay would leave out. Capture the model alone, by "
            'torch.cuda.make_graphed_callables or torch.compile(mode="reduce-overhead"), and call backward() outside; '
            "or capture backward() inside strategy.no_sync(), and give the gradients to all_reduce after each replay"
        )


def install() -> None:
    """Have backwards inside `run` reduce gradients."""
    hooks.replace_backward(reducing_backward)
