"""Where a case is replayed: its strategy, the replicas of this rank, and its values in one array library."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpistrat as ms
from conformance import encoding
from conformance.outcomes import CannotInterpret
from mpistrat.compat import v1


@dataclass(frozen=True)
class Stage:
    """One case, spread over `size` ranks of k replicas each, as rank `rank` sees it.

    `form` is what its dataset is, if it has one (`sources`).
    """

    case: dict[str, Any]
    library: encoding.Library
    rank: int = 0
    size: int = 1
    form: str = ""

    @property
    def program(self) -> dict[str, Any]:
        return self.case["program"]

    @property
    def inputs(self) -> dict[str, Any]:
        return self.case["inputs"]

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.case["id"], self.library, self.form)))

    @property
    def n(self) -> int:
        """Replicas in sync, over all ranks."""
        return self.case["replicas"]

    @property
    def k(self) -> int:
        """Replicas of this rank."""
        return self.n // self.size

    @property
    def replicas(self) -> range:
        """Global ids of the replicas of this rank."""
        return range(self.rank * self.k, (self.rank + 1) * self.k)

    def strategy(self, name: str | None = None) -> Any:
        """The strategy a recorded name stands for, such as "mirrored" or "mirrored(2)"."""
        name = name or self.program.get("strategy", "mirrored")
        count = self.k
        if sized := re.fullmatch(r"(\w+)\((\d+)\)", name):
            name, count = sized[1], int(sized[2]) // self.size
        return _strategy(ms, name, [device(i) for i in range(count)])

    def v1_strategy(self) -> Any:
        """The case's strategy, with the face that tf.compat.v1 keeps."""
        devices = [device(i) for i in range(self.k)]
        return _strategy(v1, self.program.get("strategy", "mirrored"), devices)

    def array(self, value: Any, dtype: str = "float32") -> Any:
        """`t(value)` of golden/README.md, in any dtype."""
        return encoding.array(self.library, value, dtype)

    def function(self, name: str) -> Callable[..., Any]:
        """The function of this name that NumPy and torch both have."""
        return getattr(importlib.import_module(self.library), name)

    def decode(self, encoded: Any) -> Any:
        return encoding.decode(encoded, self.library)

    def decode_all(self, encoded: Sequence[Any]) -> list[Any]:
        return [self.decode(value) for value in encoded]

    def per_replica(self, strategy: Any, values: Sequence[Any]) -> Any:
        """What `run` makes of a function that returns `values[r]` on replica r."""
        return strategy.run(lambda: values[replica_id()])

    def on_replicas(self, strategy: Any, program: Callable[[], Any]) -> list[Any]:
        """What `program` returned on each replica of this rank, before `run` regroups it."""
        returned: dict[int, Any] = {}

        def record() -> None:
            returned[replica_id()] = program()

        strategy.run(record)
        return [returned[replica] for replica in sorted(returned)]


def _strategy(names: Any, name: str, devices: list[str]) -> Any:
    """The strategy called `name`, as the module `names` makes it."""
    if name == "mirrored":
        return names.MirroredStrategy(devices)
    if name == "central_storage":
        return names.experimental.CentralStorageStrategy(devices, device(0))
    if name == "multi_worker_mirrored":
        return names.MultiWorkerMirroredStrategy(devices=devices)
    if name == "one_device":
        return names.OneDeviceStrategy(device(1))
    if name == "default":
        return names.get_strategy()
    raise CannotInterpret(f"strategy {name!r}")


def device(index: int) -> str:
    return f"cpu:{index}"


def ctx() -> Any:
    """`ctx()` of golden/README.md: None in a cross-replica context."""
    return ms.get_replica_context()


def replica_id() -> int:
    """`rid()` of golden/README.md."""
    return int(ctx().replica_id_in_sync_group)


def type_name(value: Any) -> str:
    """The class name as it is recorded: every plain array is an "EagerTensor"."""
    if type(value).__module__.split(".")[0] in ("numpy", "torch"):
        return "EagerTensor"
    return type(value).__name__


def described(value: Any) -> dict[str, Any]:
    """Class and components of a result, as `reduce_to` and its like are recorded."""
    parts = list(value.values) if isinstance(value, ms.DistributedValues) else [value]
    return {"type": type_name(value), "components": parts}


Handler = Callable[[Stage], Any]
