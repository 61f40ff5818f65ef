"""What `run` and variables mean on XLA devices, whose work is recorded first, and computed when the step has ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import arrays, nest
from mpistrat.communicators import Communicator
from mpistrat.context import entered
from mpistrat.cross_device_ops import accumulation
from mpistrat.indexed_slices import IndexedSlices
from mpistrat.options import CommunicationOptions
from mpistrat.reduce_op import ReduceOp
from mpistrat.replicas.cross_replica_ops import CrossReplicaOps
from mpistrat.replicas.local_replicas import LocalReplicas
from mpistrat.replicas.replica_context import ReplicaContext
from mpistrat.strategies.multi_worker_mirrored import MultiWorkerExtended
from mpistrat.values import DistributedValues, PassedWhole, PerReplica, select_replica
from mpistrat.variables.arguments import VariableArguments
from mpistrat.variables.variable import Variable
from mpistrat.xla import step_errors
from mpistrat.xla.compilations import Compilations, name_of
from mpistrat.xla.system import TpuSystem

if TYPE_CHECKING:
    import torch

    from mpistrat.strategy import Strategy
    from mpistrat.xla.replica_cores import ReplicaCores


class TPUExtended(MultiWorkerExtended):
    """One replica per rank on one core or over several, or one on each of a rank's cores.

    Args:
        system: the devices.
        cores_per_replica: its logical devices.

    Attributes:
        compilations: of this rank.
        logical_devices: of a replica.
        cores: of a rank with a replica on each of several; else None.
    """

    experimental_between_graph = False
    experimental_require_static_shapes = True
    records_steps = True

    def __init__(
        self,
        strategy: Strategy,
        communicator: Communicator,
        worker_devices: Sequence[str],
        *args: Any,
        system: TpuSystem,
        cores_per_replica: int,
    ) -> None:
        super().__init__(strategy, communicator, worker_devices, *args)
        self._runtime = system.runtime
        self.device_of_modules = worker_devices[0]
        self.compilations = Compilations(communicator.rank)
        # Torch's seed that XLA's generator was given, and the state in which it leaves torch's own.
        self._seed: int | None = None
        self._seeded_state = b""
        self._why_through_the_host = ""
        if communicator.size > 1 and not communicator.takes_device_buffers:
            from mpistrat.xla.transport import use_xla

            self._why_through_the_host = use_xla(communicator, system.runtime)
        from mpistrat.xla.logical_devices import LogicalDevices

        self.logical_devices = LogicalDevices(system.runtime, cores_per_replica)
        self.cores: ReplicaCores | None = None
        if self.num_local_replicas > 1:
            from mpistrat.xla.replica_cores import ReplicaCores

            self.cores = ReplicaCores(system.runtime, system.cores_of_ranks, communicator.rank)
            self.replicas, self.num_copies = LocalReplicas(1), 1
            self._contexts = [_ContextOnCores(strategy, self.first_replica_id, self.cores)]
            self.cross_replica_ops = _OpsOverCores(
                self.cores,
                communicator,
                self.replicas_of_ranks,
                None,
                self.cross_replica_ops.options,
            )

    @property
    def input_devices(self) -> tuple[str, ...]:
        """Batches for several cores go to all of them at once, when `run` gets them."""
        return self.worker_devices if self.cores is None else ()

    def explain(self) -> str:
        told = [super().explain()]
        if self._why_through_the_host:
            told.append(
                f"XLA devices: through host memory and MPI, for {self._why_through_the_host}"
            )
        told.append(self.compilations.explain())
        return "\n".join(filter(None, told))

    # Running

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record `fn` once, for all replicas of this rank, and start what was recorded."""
        name = name_of(fn)
        self._follow_seed()
        step = self._runtime.step if self.cores is None else self.cores.step
        before, on_host = 0, self._runtime.fallbacks()
        try:
            with _as_no_grad(), step(name):
                before = self._runtime.num_compilations()
                if self.cores is None:
                    result = super().call_for_each_replica(fn, args, kwargs)
                    # Of several cores, too: else what autograd has kept for a backward were results of the graph.
                    result = nest.map_structure(_cut_off, result)
                else:
                    result = self._call_on_cores(self.cores, fn, args, kwargs or {})
        except RuntimeError as error:
            step_of_rank = f"rank {self.communicator.rank}: {name}"
            if self._runtime.is_early_read(error):
                left = self._runtime.fallbacks() - on_host
                told = step_errors.early_read(step_of_rank, error, [*left])
            elif self._runtime.is_of_host(error):
                brought = (args, kwargs or {}) if self.cores else _of_one_replica(args, kwargs)
                told = step_errors.array_on_host(
                    step_of_rank, error, brought, self.worker_devices[0]
                )
            elif self._runtime.is_of_inference_mode(error):
                told = step_errors.inference_mode(step_of_rank, error)
            else:
                raise
            # The tensor that was asked for has lost its value, and as long as it is somewhere nothing is computed.
            traceback.clear_frames(error.__traceback__)
            raise RuntimeError(told) from error
        graphs = self._runtime.num_compilations() - before
        self.compilations.note(fn, (args, kwargs or {}), graphs)
        return result

    def _follow_seed(self) -> None:
        """Have XLA's generator follow the seed of torch, by another way on each rank, when a program has given one."""
        import torch

        if self._seed != torch.initial_seed():
            self._remember_seed()
        elif _state_of(torch.default_generator) != self._seeded_state:
            return
        self._runtime.seed(torch.initial_seed() + self.first_replica_id)
        if _state_of(torch.default_generator) == self._seeded_state:
            torch.rand((), device="cpu")  # so that the same seed, given again, is seen

    def _remember_seed(self) -> None:
        import torch

        self._seed = torch.initial_seed()
        self._seeded_state = _state_of(torch.Generator().manual_seed(self._seed))

    @property
    def device_random_state(self) -> int:
        self._follow_seed()
        return self._runtime.random_state()

    def set_device_random_state(self, state: int) -> None:
        self._remember_seed()
        self._runtime.seed(state)

    def _call_on_cores(
        self,
        cores: ReplicaCores,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        own_args, own_kwargs = self._spread(cores, tuple(args)), self._spread(cores, dict(kwargs))
        with entered(self.strategy, self._contexts[0]):
            result = fn(*own_args, **own_kwargs)

        def of_all(leaf: Any) -> Any:
            leaf = arrays.detach(leaf)
            if arrays.is_on_xla(leaf):
                return PerReplica(cores.rows(leaf))
            return PerReplica([leaf] * self.num_local_replicas) if arrays.is_number(leaf) else leaf

        return nest.map_structure(of_all, result)

    def _spread(self, cores: ReplicaCores, structure: Any) -> Any:
        """`structure` as one replica has it, with the values of each on its core."""
        import torch

        def spread(value: Any) -> Any:
            if not isinstance(value, DistributedValues) or isinstance(value, PassedWhole):
                return value
            components = self.cross_replica_ops.components(value)
            first = components[0]
            on_host = arrays.is_array(first) and not arrays.is_on_xla(first)
            if not on_host and all(component is first for component in components):
                return first
            if not all(arrays.is_array(c) or arrays.is_number(c) for c in components):
                raise ValueError(
                    "the replicas of a rank run one program, so what they get must be arrays, numbers, or the same "
                    f"object, got {value!r:.80}; start one rank per core for anything else"
                )
            hosts = [arrays.to_host(arrays.as_array(component)) for component in components]
            return cores.scatter([torch.as_tensor(host) for host in hosts])

        return nest.map_structure(spread, structure)

    # Combining

    def sum_of_rank(self, value: Any) -> Any:
        if self.cores is None or not arrays.is_on_xla(value):
            return value
        short = arrays.is_floating(value) and arrays.itemsize(value) < 4
        return self.cores.sum(value.float() if short else value)

    def all_reduce(
        self,
        context: ReplicaContext,
        op: ReduceOp,
        leaves: Sequence[Any],
        options: CommunicationOptions | None,
        label: str,
    ) -> list[Any]:
        if self.cores is None:
            return super().all_reduce(context, op, leaves, options, label)
        ops = self.cross_replica_ops
        sums = [
            (self.cores.sum(leaf),) if arrays.is_on_xla(leaf) else ops.components(leaf)
            for leaf in leaves
        ]
        name = f"{op.name} of {label or '*'}"
        reduced = ops.over_ranks.all_reduce(ReduceOp.SUM, sums, options, name)
        if op is ReduceOp.SUM:
            return reduced
        count = self.num_replicas_in_sync
        return [
            total / count if arrays.is_number(total) else accumulation.divide(total, count)
            for total in reduced
        ]

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """As of other strategies: what the replicas of several cores pass comes as the value of each."""
        if self.cores is None:
            return super().merge_call(context, merge_fn, args, kwargs)

        def of_all(leaf: Any) -> Any:
            if isinstance(leaf, IndexedSlices) or arrays.is_on_xla(leaf):
                return PerReplica(self.cross_replica_ops.components(leaf))
            return leaf

        given = nest.map_structure(of_all, (args, kwargs))
        return super().merge_call(context, merge_fn, *given)

    # Variables

    def _new_variable(self, asked: VariableArguments) -> Variable:
        """Of torch tensors on the rank's device, also where NumPy arrays or numbers are given."""
        with self.communicator.raising_together():
            value = asked.initial_array()
            if not arrays.is_cupy(value):
                import torch

                value = arrays.to_device(torch.as_tensor(value), self.worker_devices[0])
        return super()._new_variable(asked._replace(initial_value=value, dtype=None))


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()  # compared faster than tensors


@contextlib.contextmanager
def _as_no_grad() -> Iterator[None]:
    """Inside `torch.inference_mode()`, which torch_xla is not made for, that of `torch.no_grad()`."""
    import torch

    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def _cut_off(leaf: Any) -> Any:
    """`leaf` without what autograd knows of it; a parameter is itself."""
    return leaf if not arrays.is_on_xla(leaf) or leaf.is_leaf else leaf.detach()


def _of_one_replica(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    return select_replica(0, (tuple(args), dict(kwargs or {})))


class _ContextOnCores(ReplicaContext):
    """Of all replicas of a rank at once: which of them it is, each core knows."""

    def __init__(self, strategy: Strategy, first: int, cores: ReplicaCores) -> None:
        super().__init__(strategy, None)
        self._first, self._cores = first, cores

    def __str__(self) -> str:
        return f"the replicas from {self._first} on"

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, 0 <= id < num_replicas_in_sync: a tensor, int64, for it differs by core."""
        return self._cores.number() + self._first


class _OpsOverCores(CrossReplicaOps):
    """Takes what has one name on all cores apart into what the replicas hold."""

    def __init__(self, cores: ReplicaCores, *args: Any) -> None:
        super().__init__(*args)
        self._cores = cores

    def components(self, value: Any) -> tuple[Any, ...]:
        one = value
        if isinstance(value, DistributedValues) and len(value.values) == 1:
            one = arrays.detach_read(value.values[0])
        elif isinstance(value, DistributedValues) or not self._cores.inside:
            return super().components(value)
        if isinstance(one, IndexedSlices):
            rows = zip(self._cores.rows(one.values), self._cores.rows(one.indices), strict=True)
            return tuple(IndexedSlices(v, i, one.dense_shape) for v, i in rows)
        if not arrays.is_on_xla(one):
            return super().components(value)
        return tuple(self._cores.rows(one))
