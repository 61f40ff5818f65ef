"""torch_xla: its devices, copies to and from them, one graph for a step, and sums between processes.

This is the only file that imports torch_xla. torch_xla records operations on its tensors instead of doing them. Its
`sync` builds one graph of the operations behind all tensors that the program still holds, compiles the graph if it is
new, and starts it. (torch_xla 2.9, docs/source/learn/pytorch-on-xla-devices and learn/eager.)
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

INSTALL = "pip install 'torch_xla[tpu]>=2.9,<2.10' 'torch>=2.9,<2.10'"
# Parts of the RuntimeErrors that torch_xla and torch raise in a step.
EARLY_READ = "Unexpected execution happens"  # the step read a value before its end
ON_HOST = "Expected XLA tensor. Got: torch."  # the step computed with a tensor of the host
INFERENCE_MODE = "Cannot set version_counter for inference tensor"  # torch.inference_mode()


class Graphs:
    """Records operations as graphs, and starts the graphs."""

    def __init__(self, torch_xla: Any) -> None:
        self._torch_xla = torch_xla
        self._native = torch_xla._XLAC

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Return a context manager around one step: it records the block's operations as a graph, and starts the graph.

        The block gets nothing. At its end the graph is compiled, if it is new, and started; nobody waits for its
        values.

        Args: name: the graph's name in torch_xla's reports.
        Raises: RuntimeError, with `EARLY_READ` in its text, if the block reads a tensor's value.
        """
        graph = self._torch_xla.compile(full_graph=True, name=name)
        graph.__enter__()
        try:
            yield
        except BaseException as error:
            # Leaving starts the graph recorded so far, and may fail for the same cause.
            with contextlib.suppress(Exception):
                graph.__exit__(type(error), error, error.__traceback__)
            raise
        graph.__exit__(None, None, None)

    @property
    def recording(self) -> bool:
        """Whether the program is inside a `step`."""
        return not self._native._get_allow_execution()

    def num_compilations(self) -> int:
        """Return the number of graphs that this process has compiled so far."""
        return self._counter("UncachedCompile")

    def fallbacks(self) -> Counter[str]:
        """Return how often torch_xla has run each operation on the host so far, by the operation's name.

        torch_xla does so if XLA lacks the operation, or if the shape of the operation's result depends on values.
        """
        names = self._native._get_executed_fallback_ops()
        return Counter({name: self._counter(name) for name in names})

    def _counter(self, name: str) -> int:
        return int(self._native._xla_counter_value(name) or 0)

    def start(self, tensors: Sequence[Any]) -> None:
        """Start the graph that computes these tensors, and no other recorded operation. Do nothing inside a step.

        Called by: `Runtime.all_reduce` and `StartedOps`. It does not wait for the values.
        """
        if self.recording or True not in self._native._check_tensor_need_materialization(tensors):
            return
        # With `sync_xla_data`, the graph might overwrite its inputs with results, but other tensors need the inputs.
        self._native._xla_sync_multi(tensors, [], wait=False, sync_xla_data=False)
        for device in {str(tensor.device) for tensor in tensors}:
            # The token stands for the sums started here. If it stayed, the next sum's graph would repeat these sums.
            self._native._set_all_reduce_token(device, None)

    @contextlib.contextmanager
    def allow_execution(self) -> Iterator[None]:
        """Return a context manager around a computation: inside, XLA may compute values even in the middle of a step.

        Called by: `Runtime.fetch`, around the reading of values.
        """
        before = self._native._get_allow_execution()
        self._native._set_allow_execution(True)
        try:
            yield
        finally:
            self._native._set_allow_execution(before)


class Layouts:
    """Sets how tensors lie on the devices of one program, with GSPMD (Xu et al., arxiv.org/abs/2105.04663)."""

    def __init__(self, native: Any, runtime: Runtime) -> None:
        self._native = native
        self._runtime = runtime
        self._shardings: dict[tuple[Any, ...], Any] = {}  # by shape of the mesh, and split

    def sharding(self, mesh_shape: Sequence[int], split: Sequence[int | None]) -> Any:
        """Return torch_xla's description of a layout: dimension d of a tensor is cut over axis `split[d]` of a mesh.

        Args:
            mesh_shape: number of devices along each axis of the mesh; the product is `num_all_devices`.
            split: for each dimension of the tensor, an axis of the mesh, or None if the dimension is not cut.
        Returns: an `OpSharding` for the other methods; the same object for the same arguments.
        """
        from torch_xla.distributed import spmd

        # torch_xla keeps every mesh that has made a sharding, so each mesh is made only once.
        key = (tuple(mesh_shape), tuple(split))
        if key not in self._shardings:
            mesh = spmd.Mesh(list(range(self._runtime.num_all_devices)), key[0])
            self._shardings[key] = mesh.get_op_sharding(key[1])
        return self._shardings[key]

    def from_rows(self, rows: Sequence[Any], sharding: Any, shape: Sequence[int]) -> Any:
        """Copy this process's part of a tensor to its devices, and return the tensor of all devices.

        Args:
            rows: one CPU tensor per device of this process, in the order of the devices.
            sharding: the layout of the whole tensor, from `sharding()`.
            shape: the shape of the whole tensor.
        Raises: ValueError if a row is uint16, uint32 or uint64, because torch_xla would make it signed.
        """
        import torch

        self._runtime.check_dtypes(rows)
        return self._native._global_tensor_from_cpu_shards(list(rows), sharding, torch.Size(shape))

    def part_of(self, tensor: Any) -> Any:
        """Return a tensor of the shape of one part of `tensor`; each device's value of it is the device's part."""
        return self._native._spmd_full_to_shard_shape(tensor)

    def whole_of(self, parts: Any, sharding: Any, shape: Sequence[int]) -> Any:
        """Join the devices' own values of `parts` into one tensor: the inverse of `part_of`.

        Args:
            parts: must be the result of an operation. It is marked, in place, as each device's own value.
            sharding: where each device's value lies in the whole tensor.
            shape: the shape of the whole tensor.
        Returns: the whole tensor.
        """
        import torch
        from torch_xla.distributed.spmd import ShardingType

        manual = self._native.OpSharding([], [], [], ShardingType.MANUAL)
        self._native._mark_manual_sharding(parts, manual)
        shape = torch.Size(shape)
        return self._native._spmd_shard_to_full_shape(parts, sharding, shape, parts.dtype)

    def reduce_over_devices(self, op: str, value: Any, groups: Sequence[Sequence[int]]) -> Any:
        """Reduce the devices' own values of `value` over each group of devices.

        Args:
            op: "sum", "max" or "min".
            groups: for each group, the numbers of its devices among all devices.
        Returns: a new tensor of the shape of `value`; each device has the result of its group.
        """
        return self._native._xla_spmd_all_reduce(op, value, 1.0, [list(group) for group in groups])

    def clear_layout(self, tensor: Any) -> None:
        """Remove the layout of `tensor`. Its value must have been computed."""
        self._native._xla_clear_sharding(tensor)

    def spread(self, tensor: Any, sharding: Any) -> None:
        """Give `tensor` itself the layout `sharding`, in place. The value of a computed tensor moves through the host.

        Called by: `LogicalDevices`, outside a step. It first waits for the devices.
        """
        self._runtime.wait()  # torch_xla cannot mark a tensor that is being computed
        self._native._xla_clear_sharding(tensor)  # a tensor with a sharding takes no second one
        self._native._xla_mark_sharding(tensor, sharding)

    def spread_copy(self, tensor: Any, sharding: Any) -> Any:
        """Return a clone of `tensor` with the layout `sharding`; `tensor` itself does not change."""
        copy = tensor.clone()
        self._native._xla_annotate_custom_sharding(copy, sharding)
        return copy


class Runtime:
    """The XLA devices of this process: copies to and from them, random numbers, and sums between processes.

    Made by: `mpistrat.xla.start`, once per process.   Called by: one thread at a time.
    Attributes:
        kind: "TPU" or "CPU". On the CPU device a program traces, compiles and shards as on a TPU.
        was_in_use: whether the program had used XLA's devices before this runtime was made; their number is fixed then.
        num_devices: number of this process's devices.
        num_all_devices: number of devices of all processes that XLA connects; on the CPU device, `num_devices`.
        spmd: whether one program runs on all devices; see the modules `replica_cores` and `logical_devices`.
        cores_of_ranks: with `spmd`, for each rank the numbers of its devices among all devices that XLA knows.
        around_cut: `fetch` calls it with the tensors that it will read, and enters the returned context manager while
            XLA computes all recorded operations; `ReplicaCores.step` replaces it during a step.
    """

    def __init__(self) -> None:
        check_versions()
        try:
            import torch_xla
            import torch_xla.core.xla_model as xla_model
            import torch_xla.runtime as torch_xla_runtime
        except (ImportError, OSError) as error:
            raise ImportError(f"torch_xla cannot be loaded ({error}); {INSTALL}") from error
        self._torch_xla = torch_xla
        self._xla_model = xla_model
        self._runtime = torch_xla_runtime
        self._native: Any = torch_xla._XLAC
        self.was_in_use = bool(self._native._xla_runtime_is_initialized())
        try:
            self.kind = str(torch_xla_runtime.device_type())
            self.num_devices = int(torch_xla_runtime.addressable_runtime_device_count())
            self.num_all_devices = int(torch_xla_runtime.global_runtime_device_count())
        except (OSError, RuntimeError) as error:  # raised by libtpu, and by PJRT's client
            raise RuntimeError(
                f"XLA finds no device: {str(error).splitlines()[0]}. See that libtpu is installed ({INSTALL}) and no "
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
        """Return this process's torch device number `index`, from 0. With `spmd`, device 0 stands for all devices."""
        import torch

        return torch.device(f"xla:{index}")

    def coordinates(self) -> list[tuple[int, int, int, int]] | None:
        """Return (x, y, z, core on the chip) of each device of this process.

        Returns: None if XLA's devices have no coordinates, as on the CPU device.
        """
        names = set(self._native._xla_get_runtime_devices())
        everywhere = self._runtime.global_runtime_device_attributes()
        found = []
        try:
            for attributes in everywhere:
                if attributes["name"] in names:
                    x, y, z = map(int, attributes["coords"])
                    core = int(attributes.get("core_on_chip", 0))
                    found.append((x, y, z, core))
        except KeyError:
            return None
        return found

    def own_devices(self) -> list[int]:
        """Return the numbers of this process's devices, each from 0 to `num_all_devices` - 1."""
        all_names = list(self._native._xla_get_all_runtime_devices())
        return [all_names.index(name) for name in self._native._xla_get_runtime_devices()]

    def use_spmd(self) -> None:
        """Run one program on all devices until the process ends. Each device gets copies of existing tensors.

        A second call does nothing.
        """
        if not self.spmd:
            self._runtime.use_spmd()
            self.spmd = True

    # Copies

    def put(self, tensors: Sequence[Any], device: Any) -> list[Any]:
        """Copy CPU `tensors` to `device`. The program continues while the bytes are copied.

        Returns: a tensor on `device` for each tensor, in their order.
        Raises: ValueError for uint16, uint32 and uint64, because torch_xla would make them signed.
        """
        self.check_dtypes(tensors)
        copies = list(self._xla_model.send_cpu_data_to_device(list(tensors), device))
        if self.spmd:
            # A copy is whole on all devices. Without a mark, XLA fits its layout to the tensors that it meets.
            for copy in copies:
                self._native._xla_clear_sharding(copy)
        return copies

    def check_dtypes(self, tensors: Sequence[Any]) -> None:
        """Raises: ValueError if a host tensor is uint16, uint32 or uint64, because torch_xla would make it signed."""
        for dtype in {tensor.dtype for tensor in tensors} & self._instead_of_unsigned.keys():
            raise ValueError(
                f"torch_xla takes {dtype} for the signed type of that size, so that large numbers become negative: "
                f"convert the array to {self._instead_of_unsigned[dtype]} before it goes to the device"
            )

    def fetch(self, tensors: Sequence[Any]) -> list[Any]:
        """Return CPU copies of `tensors`, in their order. Wait until the devices have computed them.

        If one of `tensors` is only recorded, XLA first computes all recorded operations in one graph, so that no
        operation runs twice. Works also in the middle of a step.
        """
        wanted = list(tensors)
        with self.graphs.allow_execution():
            if True in self.are_pending(wanted):
                with self.around_cut(wanted):
                    self._torch_xla.sync()
            return list(self._native._xla_get_cpu_tensors(wanted))

    def are_pending(self, tensors: Sequence[Any]) -> list[bool]:
        """Return for each tensor whether its operations are recorded but not started: a list of bools."""
        return self._native._check_tensor_need_materialization(list(tensors))

    def number_of(self, tensor: Any) -> int:
        """Return XLA's number of `tensor`'s value. A torch operation that writes the tensor changes the number.

        Batch norm does not change the numbers of its running statistics.
        """
        return int(self._native._xla_get_tensor_id(tensor))

    def wait(self) -> None:
        """Wait until the devices have finished all graphs and copies that were started."""
        self._xla_model.wait_device_ops()

    # Random numbers

    def seed(self, seed: int) -> None:
        """Seed the random-number generator of device 0, or with `spmd` of all devices.

        Args: seed: any integer, or a state that `random_state` returned.
        """
        self._native._xla_set_rng_seed(seed % (1 << 63), str(self.device(0)))

    def random_state(self) -> int:
        """Return the state of device 0's random-number generator, an integer; `seed` restores it."""
        return int(self._native._xla_get_rng_seed(str(self.device(0))))

    # Between processes

    def connect(self) -> str:
        """Make torch_xla's sums go over all processes, as torch_xla's own launcher does.

        Called by: every rank, before its first `all_reduce`.
        Returns: "" on success, and with `spmd`, where nothing is to be done. Else the reason why torch_xla cannot sum
            over all processes; the tensors must then go through host memory.
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
        """Reduce each tensor over all processes, by an operation in XLA's graph. Called by: every rank.

        Outside a step, the reductions start at once in a graph without other operations. So no rank runs the graph
        alone later, and the graph is the same on all ranks, even if only some ranks have computed the operand.

        Args: op: "sum", "max" or "min".
        Returns: new tensors with the results, in the order of `tensors`. If XLA does not connect the processes, a
            result has the operand's own values; nothing is raised.
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
    """Check the installed versions. The packages are not imported.

    Raises: ImportError if torch or torch_xla is missing, or if torch_xla is built against another torch version.
    """
    import importlib.metadata  # imported here, so that `import mpistrat` stays fast

    try:
        torch_xla = importlib.metadata.version("torch_xla")
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as missing:
        raise ImportError(
            f"TPUStrategy needs {missing.name}, which is not installed: {INSTALL}"
        ) from None
    wrong, command = what_differs(torch_xla, torch)
    if wrong:
        raise ImportError(f"{wrong}: {command}")


def what_differs(torch_xla: str, torch: str) -> tuple[str, str]:
    """Compare the versions of torch_xla and torch: their first two numbers must be equal.

    Args: torch: torch's version; "" if torch is not installed.
    Returns: (a sentence that says the mismatch, a pip command that mends it); ("", "") if the versions fit.
    """
    built_against = torch_xla.split(".")[:2]
    installed = torch.partition("+")[0].split(".")[:2]
    if installed == built_against:
        return "", ""
    series = ".".join(built_against)
    here = f"torch {torch}" if torch else "no torch"
    return (
        f"torch_xla {torch_xla} is built against torch {series}, and this is {here}",
        f"pip install 'torch=={series}.*' 'torch_xla=={series}.*', in an environment of its own",
    )
