"""Options of collectives, of `run` and of inputs: frozen values that check themselves."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

WIRE_DTYPES = ("bfloat16", "float16")
_WIRE = {"wire_dtype", "wire_format"}


_E = TypeVar("_E", bound=enum.Enum)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _member(kind: type[_E], value: object, argument: str) -> _E:
    """The member of `kind` that `value` is, or names in any case."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(kind.__members__)
    raise ValueError(f"{argument} must be one of {names}; got {value!r:.60}")


class CommunicationImplementation(enum.Enum):
    """By which way a collective moves bytes.

    AUTO: by size, whichever has been measured to be the fastest (`strategy.extended.explain()` says what is).
    RING: from each rank to the next, all-reduces and gathers; the rest through MPI.
    NCCL: between GPUs, all ranks alike. What lies in host memory goes as with AUTO.
    HIERARCHICAL: what is large, on GPUs of several nodes: through NCCL within each node, then in slices through MPI
        between the nodes. All else goes as with AUTO.
    MPI: everything through MPI's own collectives, without shared memory.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    HIERARCHICAL = "HIERARCHICAL"
    MPI = "MPI"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one collective, or for all collectives of a strategy.

    Args:
        bytes_per_pack: close a bucket of fused arrays once it exceeds this many bytes; 0 puts
            everything into one bucket per dtype.
        timeout_seconds: does nothing, and a warning says so; a collective that can never end is ended without it.
        implementation: a `CommunicationImplementation` or its name in any case; the same on all ranks. Given to a
            strategy it counts for all that the strategy combines, gradients included.
        overlap: of a strategy, whether gradients leave, in buckets of `bytes_per_pack` (0: 4 MiB; on a device a
            sixteenth of all gradients, from 1 to 25 MiB), while `backward()` runs. None: on a device they do; on the
            host both ways are timed over the first steps, and the faster one stays.
        wire_dtype: of a strategy, "bfloat16" or "float16" (or torch's, NumPy's): sums of gradients cross the network in
            it, with error feedback; between ranks that share memory nothing changes. Where a device's own library
            (NCCL) sums gradients of 32 bits or fewer, they are rounded to it, added up in it, and cast back, without
            error feedback; otherwise 16-bit gradients are added up as float32 there, too.
        wire_format: instead, a `mpistrat.wire_formats.WireFormat`, such as `TopK(0.01)`.

    `overlap`, `wire_dtype` and `wire_format` do nothing in the options of one collective, and a warning says so.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    overlap: bool | None = None
    wire_dtype: Any = None
    wire_format: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not _is_integer(self.bytes_per_pack):
            raise TypeError(f"bytes_per_pack must be an integer, got {self.bytes_per_pack!r:.60}")
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0, got {self.bytes_per_pack}")
        seconds, wire_format = self.timeout_seconds, self.wire_format
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float, type(None))):
            raise TypeError(f"timeout_seconds must be a number or None, got {seconds!r:.60}")
        if seconds is not None and not seconds >= 0:
            raise ValueError(f"timeout_seconds must be >= 0, got {seconds}")
        implementation = _member(CommunicationImplementation, self.implementation, "implementation")
        object.__setattr__(self, "implementation", implementation)
        if not isinstance(self.overlap, (bool, type(None))):
            raise TypeError(f"overlap must be True, False or None, got {self.overlap!r:.60}")
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", self._name_of_wire_dtype())
        if wire_format is not None and not callable(getattr(wire_format, "combine", None)):
            raise TypeError(
                f"wire_format must have a method combine(communicator, values, residual), got {wire_format!r:.60}"
            )

    def _name_of_wire_dtype(self) -> str:
        name = getattr(self.wire_dtype, "__name__", str(self.wire_dtype)).split(".")[-1]
        if name not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype must be one of {WIRE_DTYPES}, got {self.wire_dtype!r:.60}"
            )
        if self.wire_format is not None:
            raise ValueError("wire_dtype is a wire format: give it or wire_format, not both")
        return name

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """These options, overridden by every field of `other` that is not at its default."""
        fields = vars(check_options(other))
        changed = {name for name, value in fields.items() if value != getattr(type(self), name)}
        if changed & _WIRE:  # the one takes the place of the other
            changed |= _WIRE
        return dataclasses.replace(self, **{name: fields[name] for name in changed})


def check_options(options: CommunicationOptions | None) -> CommunicationOptions:
    """`options`, the defaults for None; TypeError for anything else."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(f"options must be CommunicationOptions or None, got {options!r:.60}")
    return options


def implementation_of(options: CommunicationOptions | None) -> CommunicationImplementation:
    """By which way `options` have bytes move; TypeError for what are none."""
    implementation = check_options(options).implementation
    assert isinstance(implementation, CommunicationImplementation)
    return implementation


def CollectiveHints(  # noqa: N802 - the deprecated name that tf.distribute keeps
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Deprecated spelling of `CommunicationOptions(bytes_per_pack, timeout_seconds)`."""
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, which do nothing: a run that is given some says so once.

    `run` calls functions as they are, with whatever shapes come. XLA compiles steps for each set of shapes.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None


class InputReplicationMode(enum.Enum):
    """Whether an input function is called once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """How workers share a dataset out. Each rank of a MultiWorkerMirroredStrategy is a worker.

    AUTO: FILE for a `mpistrat.input.FileDataset`, else DATA.
    FILE: each worker reads files of its own, of which there are at least as many as workers.
    DATA: every worker takes its part of each global batch.
    OFF: every worker reads everything.
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of distributed inputs.

    Args:
        experimental_fetch_to_device: move batches to the replica's device; None means True.
        experimental_replication_mode: one input pipeline per worker, or per replica.
        experimental_place_dataset_on_device: does nothing, and a warning says so; TensorFlow takes it with PER_REPLICA.
        experimental_per_replica_buffer_size: batches of each replica on their way to a GPU, or read ahead, where
            another thread reads (files, examples of an object): there are at least 4 of them, and another 5 of files
            of a rank's own. Memory that the source has pinned must not be used again by it while they are.
        experimental_auto_shard_policy: an `AutoShardPolicy` or its name in any case. (tf.data has it in the dataset's
            own options.)
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    experimental_auto_shard_policy: AutoShardPolicy | str = AutoShardPolicy.AUTO

    def __post_init__(self) -> None:
        argument = "experimental_auto_shard_policy"
        policy = _member(AutoShardPolicy, self.experimental_auto_shard_policy, argument)
        object.__setattr__(self, argument, policy)
        mode = self.experimental_replication_mode
        buffered = self.experimental_per_replica_buffer_size
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                f"experimental_replication_mode must be an InputReplicationMode, got {mode!r:.60}"
            )
        if not _is_integer(buffered) or buffered < 1:
            raise ValueError(
                f"experimental_per_replica_buffer_size must be a positive integer, got {buffered!r:.60}"
            )
