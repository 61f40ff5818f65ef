"""Options of collectives, of `run` and of inputs: frozen dataclasses that check their fields, and enums."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar, cast

WIRE_DTYPES = ("bfloat16", "float16")
_WIRE = {"wire_dtype", "wire_format"}


_E = TypeVar("_E", bound=enum.Enum)


def is_integer(value: object) -> bool:
    """Whether `value` is a Python integer. False for booleans."""
    return isinstance(value, int) and not isinstance(value, bool)


def _member(kind: type[_E], value: object, argument: str) -> _E:
    """Return `value` as a member of the enum `kind`.

    Args:
        value: a member, or its name in upper or lower case.
        argument: name of the user's argument, for the message.
    Raises: ValueError, with the names of all members, for any other value.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(kind.__members__)
    raise ValueError(f"{argument} must be one of {names}; got {value!r:.60}")


class CommunicationImplementation(enum.Enum):
    """The way by which a collective moves bytes.

    AUTO: the way that was measured to be the fastest for the size; `strategy.extended.explain()` names the way.
    RING: all-reduces and gathers go from each rank to the next; other collectives go through MPI.
    NCCL: through NCCL between GPUs, in one NCCL group of all ranks. Buffers in host memory are sent as with AUTO.
    HIERARCHICAL: large buffers on GPUs of several nodes go through NCCL within each node, then in slices through MPI
        between the nodes. Other buffers are sent as with AUTO.
    MPI: through MPI's own collectives, without shared memory.

    Example:
        >>> options = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.RING)
        >>> options == ms.CommunicationOptions(implementation="ring")
        True
        >>> ms.CommunicationOptions(implementation="fast")
        Traceback (most recent call last):
        ValueError: implementation must be one of AUTO, RING, NCCL, HIERARCHICAL, MPI; got 'fast'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    HIERARCHICAL = "HIERARCHICAL"
    MPI = "MPI"


CollectiveCommunication = CommunicationImplementation  # its name in tf.distribute.experimental


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one collective, or for all collectives of a strategy.

    Args:
        bytes_per_pack: a bucket of fused arrays is closed once it exceeds this many bytes; 0 puts all arrays of a dtype
            into one bucket.
        timeout_seconds: has no effect, and a warning says so. A collective that lasts longer than
            MPISTRAT_STALL_SECONDS is reported and ends the job, and one that waits for a dead rank ends at once.
        implementation: a `CommunicationImplementation` or its name in any case; the same on all ranks. A strategy uses
            it for all values that it combines, gradients included.
        overlap: for a strategy, whether gradients are sent in buckets (groups of gradients) while `backward()` runs,
            and not all afterwards. A bucket has `bytes_per_pack` bytes (0: 4 MiB; on a device a sixteenth of all
            gradients, from 1 to 25 MiB). None: True on a device; on the host the strategy times True and False over the
            first steps, and keeps the faster one.
        wire_dtype: for a strategy, "bfloat16" or "float16" (or torch's or NumPy's dtype). Sums of gradients cross the
            network in this dtype, with error feedback (the rounding error is added to the next sum). Between ranks that
            share memory nothing changes. If a device's own library (NCCL) sums gradients of 32 bits or fewer, it rounds
            them to `wire_dtype`, adds them up in it, and casts them back, without error feedback. Without `wire_dtype`,
            16-bit gradients are added up as float32 there, too.
        wire_format: a `mpistrat.wire_formats.WireFormat`, such as `TopK(0.01)`, instead of `wire_dtype`.
    Raises: TypeError or ValueError for a field of another type or value, and for both `wire_dtype` and `wire_format`.

    `overlap`, `wire_dtype` and `wire_format` have no effect in the options of one collective, and a warning says so.

    Example:
        >>> options = ms.CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring")
        >>> merged = options.merge(ms.CommunicationOptions(bytes_per_pack=1 << 22))
        >>> merged.bytes_per_pack, merged.implementation.name
        (4194304, 'RING')
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    overlap: bool | None = None
    wire_dtype: Any = None
    wire_format: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not is_integer(self.bytes_per_pack):
            raise TypeError(f"bytes_per_pack must be an integer, got {self.bytes_per_pack!r:.60}")
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0, got {self.bytes_per_pack}")
        seconds = self.timeout_seconds
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise TypeError(f"timeout_seconds must be a number or None, got {seconds!r:.60}")
            if not seconds >= 0:
                raise ValueError(f"timeout_seconds must be >= 0, got {seconds}")
        implementation = _member(CommunicationImplementation, self.implementation, "implementation")
        object.__setattr__(self, "implementation", implementation)
        if not isinstance(self.overlap, (bool, type(None))):
            raise TypeError(f"overlap must be True, False or None, got {self.overlap!r:.60}")
        if self.wire_dtype is not None:
            object.__setattr__(self, "wire_dtype", self._name_of_wire_dtype())
        wire_format = self.wire_format
        if wire_format is not None and not callable(getattr(wire_format, "combine", None)):
            raise TypeError(
                f"wire_format must have a method combine(communicator, values, residual), got {wire_format!r:.60}"
            )

    def _name_of_wire_dtype(self) -> str:
        spelling = getattr(self.wire_dtype, "__name__", str(self.wire_dtype))
        name = spelling.split(".")[-1]
        if name not in WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype must be one of {WIRE_DTYPES}, got {self.wire_dtype!r:.60}"
            )
        if self.wire_format is not None:
            raise ValueError("wire_dtype is a wire format: give it or wire_format, not both")
        return name

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Return new options: each field of `other` that is not at its default, and the fields of `self` elsewhere.

        Args:
            other: further options; None gives a copy of `self`. If it has a `wire_dtype` or a `wire_format`, both
                fields come from it.
        Raises: TypeError if `other` is neither options nor None.
        """
        fields = vars(check_options(other))
        defaults = type(self)
        changes = {
            name: value for name, value in fields.items() if value != getattr(defaults, name)
        }
        if not _WIRE.isdisjoint(changes):  # wire_dtype and wire_format replace each other
            changes["wire_dtype"] = fields["wire_dtype"]
            changes["wire_format"] = fields["wire_format"]
        return dataclasses.replace(self, **changes)


def check_options(options: CommunicationOptions | None) -> CommunicationOptions:
    """Return `options`, or default ones for None. Raises: TypeError for anything else."""
    if options is None:
        return CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise TypeError(f"options must be CommunicationOptions or None, got {options!r:.60}")
    return options


def implementation_of(options: CommunicationOptions | None) -> CommunicationImplementation:
    """Return the `implementation` of `options` as an enum member; AUTO if `options` is None.

    Raises: TypeError if `options` is anything else.
    """
    return cast("CommunicationImplementation", check_options(options).implementation)


def CollectiveHints(  # noqa: N802 - the deprecated name that tf.distribute keeps
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Return `CommunicationOptions(bytes_per_pack, timeout_seconds)`: a deprecated name.

    Example:
        >>> ms.experimental.CollectiveHints(bytes_per_pack=1 << 20) == ms.CommunicationOptions(bytes_per_pack=1 << 20)
        True
    """
    return CommunicationOptions(bytes_per_pack, timeout_seconds)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`. They have no effect, and a warning says so once.

    `run` calls functions as they are, with arrays of any shapes. XLA compiles steps for each set of shapes.

    Example:
        >>> ms.OneDeviceStrategy("cpu").run(abs, args=(-1,), options=ms.RunOptions())  # warns, and calls `abs`
        1
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None


class InputReplicationMode(enum.Enum):
    """Whether an input function is called once for each worker, or once for each replica.

    Example:
        >>> def batches(context):  # called for each of the two replicas
        ...     return [np.array([context.input_pipeline_id])]
        >>> options = ms.InputOptions(experimental_replication_mode=ms.InputReplicationMode.PER_REPLICA)
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> [step.values for step in strategy.distribute_datasets_from_function(batches, options)]
        [(array([0]), array([1]))]
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """How workers share a dataset. Each rank of a MultiWorkerMirroredStrategy is a worker.

    AUTO: FILE for a `mpistrat.input.FileDataset`, else DATA.
    FILE: each worker reads its own files. There must be at least as many files as workers.
    DATA: each worker takes its part of each global batch.
    OFF: each worker reads the whole dataset.

    Example:
        >>> strategy = ms.MirroredStrategy(["cpu:0", "cpu:1"])  # one worker with two replicas
        >>> options = ms.InputOptions(experimental_auto_shard_policy=ms.AutoShardPolicy.DATA)
        >>> [step.values for step in strategy.experimental_distribute_dataset([np.arange(4)], options)]
        [(array([0, 1]), array([2, 3]))]
    """

    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    OFF = "OFF"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """Options of distributed inputs.

    Args:
        experimental_fetch_to_device: whether batches are moved to the replica's device; None means True.
        experimental_replication_mode: an `InputReplicationMode`: one input pipeline for each worker, or for each
            replica.
        experimental_place_dataset_on_device: has no effect, and a warning says so; TensorFlow uses it with PER_REPLICA.
        experimental_per_replica_buffer_size: number of batches for each replica that are read before the program asks
            for them, because they are copied to a GPU, or because a thread reads files or single examples. Such a
            thread reads at least 4 batches ahead, and 5 more from a rank's own files. A dataset of batches in pinned
            memory must not reuse that memory while these batches are in use. A `DataLoader`'s sampler that is not
            torch's own is asked for so many batches at once.
        experimental_auto_shard_policy: an `AutoShardPolicy` or its name in any case. (tf.data has it in the dataset's
            own options.)
    Raises: ValueError for an unknown policy, or a buffer size below 1; TypeError for another mode.

    Example:
        >>> options = ms.InputOptions(experimental_auto_shard_policy="off", experimental_per_replica_buffer_size=4)
        >>> list(ms.OneDeviceStrategy("cpu").experimental_distribute_dataset([np.zeros(2)], options))
        [array([0., 0.])]
        >>> ms.InputOptions(experimental_auto_shard_policy="files")
        Traceback (most recent call last):
        ValueError: experimental_auto_shard_policy must be one of AUTO, FILE, DATA, OFF; got 'files'
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
        if not is_integer(buffered) or buffered < 1:
            raise ValueError(
                f"experimental_per_replica_buffer_size must be a positive integer, got {buffered!r:.60}"
            )
