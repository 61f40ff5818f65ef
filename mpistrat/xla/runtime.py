"""torch_xla: its devices, copies to and from them, one graph for a step, and sums between processes.

The only file that imports torch_xla. Operations on its tensors are recorded, not done; `sync` compiles what was
recorded for all tensors that the program still has into one graph, once for each such graph, and starts it.
(torch_xla 2.9, docs/source/learn/pytorch-on-xla-devices and learn/eager.)
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

EXTRA = "pip install 'mpistrat[tpu]'"
# What a RuntimeError says of a step that asked for a value before its end
EARLY_READ = "Unexpected execution happens"
ON_HOST = "Expected XLA tensor. Got: torch."  # of one that computed with a tensor of the host
INFERENCE_MODE = "Cannot set version_counter for inference tensor"  # of one in torch.inference_mode(), as torch says it


class Graphs:
    """What is recorded, and computed later."""

    def __init__(self, torch_xla: Any) -> None:
        self._torch_xla, self._native = torch_xla, torch_xla._XLAC

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """What is recorded inside is one graph, started at the end; one that needs a value earlier is an error.

        Raises: RuntimeError, with `EARLY_READ` in its text, where the program asks for a value.
        """
        graph = self._torch_xla.compile(full_graph=True, name=name)
        graph.__enter__()
        try:
            yield
        except BaseException as error:
            # It starts what there is, and may fail of the same cause.
            with contextlib.suppress(Exception):
                graph.__exit__(type(error), error, error.__traceback__)
            raise
        graph.__exit__(None, None, None)

    @property
    def recording(self) -> bool:
        """Whether the program is inside a `step`."""
        return not self._native._get_allow_execution()

    def num_compilations(self) -> int:
        """Graphs that this process has compiled."""
        return self._counter("UncachedCompile")

    def fallbacks(self) -> Counter[str]:
        """How often the host has done operations that XLA does not have, or whose results' shapes depend on values."""
        names = self._native._get_executed_fallback_ops()
        return Counter({name: self._counter(name) for name in names})

    def _counter(self, name: str) -> int:
        return int(self._native._xla_counter_value(name) or 0)

    def start(self, tensors: Sequence[Any]) -> None:
        """Start the graph of these tensors alone; what was recorded for others stays recorded. In a step: nothing."""
        if self.recording or not any(self._native._check_tensor_need_materialization(tensors)):
            return
        # With `sync_xla_data`, the graph may write results into its inputs' memory, which other tensors still need.
        self._native._xla_sync_multi(tensors, [], wait=False, sync_xla_data=False)
        for device in {str(tensor.device) for tensor in tensors}:
            # The token stands for the sums started here. If it stayed, the next sum's graph would hold them again.
            self._native._set_all_reduce_token(device, None)

    @contextlib.contextmanager
    def allow_execution(self) -> Iterator[None]:
        """Inside, values may be computed, also in the middle of a step."""
        before = self._native._get_allow_execution()
        self._native._set_allow_execution(True)
        try:
            yield
        finally:
            self._native._set_allow_execution(before)


class Layouts:
    """How tensors lie on the devices of one program, as GSPMD says it (Xu et al., arxiv.org/abs/2105.04663).

    Args:
        native: torch_xla's module in C++.
        runtime: of these devices.
    """

    def __init__(self, native: Any, runtime: Runtime) -> None:
        self._native, self._runtime = native, runtime
        self._shardings: dict[tuple[tuple[int, ...], tuple[int | None, ...]], Any] = {}

    def sharding(self, mesh_shape: Sequence[int], split: Sequence[int | None]) -> Any:
        """That a tensor's dimension d is cut over axis `split[d]` of a mesh of all devices, or whole (None)."""
        from torch_xla.distributed import spmd

        # torch_xla keeps each mesh that it was asked for a sharding of.
        key = tuple(mesh_shape), tuple(split)
        if key not in self._shardings:
            mesh = spmd.Mesh(list(range(self._runtime.num_all_devices)), key[0])
            self._shardings[key] = mesh.get_op_sharding(key[1])
        return self._shardings[key]

    def from_rows(self, rows: Sequence[Any], sharding: Any, shape: Sequence[int]) -> Any:
        """The tensor of `shape` of which this process's devices have `rows`, on the host, in the order of devices."""
        import torch

        self._runtime.check_dtypes(rows)
        return self._native._global_tensor_from_cpu_shards(list(rows), sharding, torch.Size(shape))

    def part_of(self, tensor: Any) -> Any:
        """The part of a tensor that each device has. Each device goes on with its part alone."""
        return self._native._spmd_full_to_shard_shape(tensor)

    def whole_of(self, parts: Any, sharding: Any, shape: Sequence[int]) -> Any:
        """The inverse of `part_of`, for the result of an operation, which is marked as each device's own."""
        import torch
        from torch_xla.distributed.spmd import ShardingType

        manual = self._native.OpSharding([], [], [], ShardingType.MANUAL)
        self._native._mark_manual_sharding(parts, manual)
        shape = torch.Size(shape)
        return self._native._spmd_shard_to_full_shape(parts, sharding, shape, parts.dtype)

    def reduce_over_devices(self, op: str, value: Any, groups: Sequence[Sequence[int]]) -> Any:
        """The sum, or else, of the devices' own values over the devices of a group, on each of them."""
        return self._native._xla_spmd_all_reduce(op, value, 1.0, [list(group) for group in groups])

    def clear_layout(self, tensor: Any) -> None:
        """Nothing is said any more of how the value of `tensor`, which is computed, lies on the devices."""
        self._native._xla_clear_sharding(tensor)

    def spread(self, tensor: Any, sharding: Any) -> None:
        """Lays `tensor` itself out over the devices; a value that is there goes through the host. Not inside a step."""
        self._runtime.wait()  # a value that is being computed cannot be marked
        self._native._xla_clear_sharding(tensor)  # it takes no second one
        self._native._xla_mark_sharding(tensor, sharding)

    def spread_copy(self, tensor: Any, sharding: Any) -> Any:
        """Its value, for which the program says how it is laid out; `tensor` stays as it is."""
        copy = tensor.clone()
        self._native._xla_annotate_custom_sharding(copy, sharding)
        return copy


class Runtime:
    """Called by: one thread at a time, as torch's own devices are.

    Attributes:
        kind: "TPU", or "CPU", on which the same tracing, compilation and sharding can be tried.
        was_in_use: the program had used XLA's devices before this runtime was made. Their number is fixed since then.
        num_devices: those of this process.
        num_all_devices: those of all processes that XLA itself connects; on the CPU device `num_devices`.
        graphs: what is recorded.
        layouts: how tensors lie on the devices.
        spmd: one program runs on all devices: see `replica_cores`, `logical_devices`.
        cores_of_ranks: with `spmd`, the numbers of each rank's devices among all that XLA knows.
        around_cut: a context for computing what was recorded in the middle of a step, of which these are wanted.
    """

    def __init__(self) -> None:
        check_versions()
        try:
            import torch_xla
            import torch_xla.core.xla_model as xla_model
            import torch_xla.runtime as torch_xla_runtime
        except (ImportError, OSError) as error:
            raise ImportError(f"torch_xla cannot be loaded ({error}); {EXTRA}") from error
        self._torch_xla, self._xla_model = torch_xla, xla_model
        self._runtime = torch_xla_runtime
        self._native: Any = torch_xla._XLAC
        self.was_in_use = bool(self._native._xla_runtime_is_initialized())
        try:
            self.kind = str(torch_xla_runtime.device_type())
            self.num_devices = int(torch_xla_runtime.addressable_runtime_device_count())
            self.num_all_devices = int(torch_xla_runtime.global_runtime_device_count())
        except (OSError, RuntimeError) as error:  # of libtpu's library, or of PJRT's client
            raise RuntimeError(
                f"XLA finds no device: {str(error).splitlines()[0]}. See that libtpu is installed ({EXTRA}) and no "
                "other process holds the chips; to try a program without a TPU, set PJRT_DEVICE=CPU"
            ) from error
        import torch

        self._instead_of_unsigned = {
            torch.uint16: torch.int32,
            torch.uint32: torch.int64,
            torch.uint64: torch.int64,
        }
        self.graphs = Graphs(torch_xla)
        self.layouts = Layouts(self._native, self)
        self.spmd = False
        self.cores_of_ranks: Sequence[Sequence[int]] = []
        self.around_cut: Callable[[Sequence[Any]], contextlib.AbstractContextManager[Any]] = (
            contextlib.nullcontext
        )

    # Devices

    def device(self, index: int) -> Any:
        """The torch device of number `index`, of `num_devices`; with `spmd` there is one that stands for all."""
        import torch

        return torch.device(f"xla:{index}")

    def coordinates(self) -> list[tuple[int, int, int, int]] | None:
        """Of each of this process's devices: x, y, z of its chip and its core there. None where they have none."""
        names = set(self._native._xla_get_runtime_devices())
        everywhere = self._runtime.global_runtime_device_attributes()
        try:
            return [
                (*map(int, attributes["coords"]), int(attributes.get("core_on_chip", 0)))  # type: ignore[misc]
                for attributes in everywhere
                if attributes["name"] in names
            ]
        except KeyError:
            return None

    def own_devices(self) -> list[int]:
        """The numbers of this process's devices among `num_all_devices`."""
        all_names = list(self._native._xla_get_all_runtime_devices())
        return [all_names.index(name) for name in self._native._xla_get_runtime_devices()]

    def use_spmd(self) -> None:
        """From now on one program runs on all devices; tensors that there are become whole on each. Not undone."""
        if not self.spmd:
            self._runtime.use_spmd()
            self.spmd = True

    # Copies

    def put(self, tensors: Sequence[Any], device: Any) -> list[Any]:
        """Copies of CPU `tensors` on `device`; the copying goes on while the program does.

        Raises: ValueError for dtypes that would not stay what they are.
        """
        self.check_dtypes(tensors)
        copies = list(self._xla_model.send_cpu_data_to_device(list(tensors), device))
        if self.spmd:
            for copy in copies:  # are whole on all devices, and go with what they meet
                self._native._xla_clear_sharding(copy)
        return copies

    def check_dtypes(self, tensors: Sequence[Any]) -> None:
        """Raises: ValueError for tensors on the host that would not stay what they are."""
        for dtype in {tensor.dtype for tensor in tensors} & self._instead_of_unsigned.keys():
            raise ValueError(
                f"torch_xla takes {dtype} for the signed type of that size, so that large numbers become negative: "
                f"convert the array to {self._instead_of_unsigned[dtype]} before it goes to the device"
            )

    def fetch(self, tensors: Sequence[Any]) -> list[Any]:
        """Their values on the host. What was recorded is computed first, all of it, so that nothing is done twice."""
        wanted = list(tensors)
        with self.graphs.allow_execution():
            if any(self.are_pending(wanted)):
                with self.around_cut(wanted):
                    self._torch_xla.sync()
            return list(self._native._xla_get_cpu_tensors(wanted))

    def are_pending(self, tensors: Sequence[Any]) -> list[bool]:
        """Of which nothing has been computed yet."""
        return self._native._check_tensor_need_materialization(list(tensors))

    def number_of(self, tensor: Any) -> int:
        """Changes when an operation of torch writes `tensor`; XLA's batch norm does not count."""
        return int(self._native._xla_get_tensor_id(tensor))

    def wait(self) -> None:
        """Until the devices have done what they were given."""
        self._xla_model.wait_device_ops()

    # Random numbers

    def seed(self, seed: int) -> None:
        """What device 0 draws from now on (with `spmd`, all do) follows from `seed`, or from a `random_state`."""
        self._native._xla_set_rng_seed(seed % (1 << 63), str(self.device(0)))

    def random_state(self) -> int:
        """With which `seed` goes on."""
        return int(self._native._xla_get_rng_seed(str(self.device(0))))

    # Between processes

    def connect(self) -> str:
        """Have torch_xla sum over all processes, as its own launcher does. Called before the first `all_reduce`.

        Returns: why torch_xla cannot; "" if it can. With `spmd` there is nothing to do.
        """
        if self.spmd:
            return ""
        if self._runtime.is_spmd():
            return "the program has called torch_xla.runtime.use_spmd()"
        if self.num_devices > 1:
            return f"a replica has one of the rank's {self.num_devices} cores, and XLA sums over all cores"
        devices = self._xla_model.get_xla_supported_devices()
        self._xla_model.set_replication(self.device(0), devices)
        # torch_xla keeps the first answer of `world_size()`. Before `set_replication` the answer is 1.
        self._runtime._WORLD_SIZE = None
        return ""

    def all_reduce(self, op: str, tensors: Sequence[Any]) -> list[Any]:
        """Of all processes' `tensors`, inside the graph, where XLA connects them; else they come back as they are.

        Outside a step each sum is started at once, so that no rank runs a sum alone when it reads a value. The sum's
        graph has nothing else in it, so it is the same on all ranks, even if only some have computed their operand.

        Args:
            op: "sum", "max" or "min".
        """
        self.graphs.start(tensors)
        if self.spmd:
            across = [*zip(*self.cores_of_ranks, strict=True)]
            reduce = self.layouts.reduce_over_devices
            reduced = [reduce(op, tensor, across) for tensor in tensors]
        else:
            reduced = [self._xla_model.all_reduce(op, tensor) for tensor in tensors]
        self.graphs.start(reduced)
        return reduced


def check_versions() -> None:
    """Raises: ImportError where torch_xla is missing, or of another version than torch, which it is built against."""
    import importlib.metadata  # a twentieth of the time of `import mpistrat`

    try:
        ours, torch = map(importlib.metadata.version, ("torch_xla", "torch"))
    except importlib.metadata.PackageNotFoundError as missing:
        raise ImportError(
            f"TPUStrategy needs {missing.name}, which is not installed: {EXTRA}"
        ) from None
    wrong, command = what_differs(ours, torch)
    if wrong:
        raise ImportError(f"{wrong}: {command}")


def what_differs(torch_xla: str, torch: str) -> tuple[str, str]:
    """How these versions do not belong together, and the command that mends it; empty where they do."""
    series = ".".join(torch_xla.split(".")[:2])
    if torch.split("+")[0].split(".")[:2] == series.split("."):
        return "", ""
    here = f"torch {torch}" if torch else "no torch"
    return (
        f"torch_xla {torch_xla} is built against torch {series}, and this is {here}",
        f"pip install 'torch=={series}.*' 'torch_xla=={series}.*', in an environment of its own",
    )
