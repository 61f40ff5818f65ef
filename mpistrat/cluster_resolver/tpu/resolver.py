"""The hosts of a TPU slice. MPI starts the ranks on them, and knows who is who."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, host_of
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.tpu.chips import local_cores
from mpistrat.cluster_resolver.tpu.discovery import discover_slice
from mpistrat.cluster_resolver.tpu.slice import TPUSlice
from mpistrat.topology import Topology

_LOCAL = "local"
_GRPC = "grpc"
_PORT = 8470  # where TensorFlow looks for a host; nobody connects to it here


class TPUClusterResolver(ClusterResolver):
    """The hosts of a TPU slice, of which this is one.

    Args:
        tpu: None or "": the slice of this host, as variables of GKE or Google's metadata server tell it. "local": the
            chips of this host, alone. Addresses of all hosts in the order of their worker ids, in a list or between
            commas, "10.0.0.1:8470,grpc://10.0.0.2": instead of those that are found. A name: of the TPU that this
            host must belong to.
        zone, project: likewise those that it must belong to.
        job_name: of the hosts, in `cluster_spec`.
        coordinator_name, coordinator_address: of a further job, with one task.
    The constructor asks nobody. The first use of a member that needs the slice asks, for some seconds at most.
    What tf.distribute has beyond that is not here: no Cloud TPU API is asked (credentials, service, discovery_url), and
    no server is started for a coordinator without an address.
    Raises: ValueError for addresses that cannot be read; by other members, NotFoundError when this is no TPU host, and
        ValueError when what is told of the slice cannot be, or it is another one.
    """

    launcher = "tpu"

    def __init__(
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ):
        super().__init__(job_name, 0)
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_address:
            if not coordinator_name:
                raise ValueError(
                    f"coordinator_address={coordinator_address!r:.80} without coordinator_name: name its job"
                )
            self._coordinator[coordinator_name] = [coordinator_address]
        self._environ = environ
        self._local = tpu == _LOCAL
        self._endpoints = _endpoints(tpu)
        name = tpu if isinstance(tpu, str) and not self._local and not self._endpoints else None
        self._asked = {"name": name, "zone": zone, "project": project}

    def slice(self) -> TPUSlice | None:
        """The slice, and the worker id of this host; None for "local", where PJRT finds the chips itself."""
        return None if self._local else self._slice

    @functools.cached_property
    def _slice(self) -> TPUSlice:
        found = discover_slice(self._environ, [host_of(e) for e in self._endpoints])
        for what, asked in self._asked.items():
            actual = getattr(found, what)
            if actual and asked not in (None, "", actual):
                raise ValueError(
                    f"TPUClusterResolver: {what}={asked!r:.80}, but this host belongs to a "
                    f"{found.accelerator_type} whose {what} is {actual!r:.80}: start the ranks on the hosts of the "
                    "other, or leave it out"
                )
        return found

    def cluster_spec(self) -> ClusterSpec:
        """One task per host, by worker id, and the coordinator; nothing for "local"."""
        if self._local:
            return ClusterSpec({})
        endpoints = self._endpoints
        if not endpoints:
            addresses = self._slice.addresses or ("localhost",)
            endpoints = [f"{address}:{_PORT}" for address in addresses]
        return ClusterSpec({self.task_type or "worker": endpoints, **self._coordinator})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """grpc:// and the address of the task that is given, else of this resolver's; '' for "local"."""
        if self._local:
            return ""
        if None in (task_type, task_id):
            task_type, task_id = self.task_type, self.task_id
        return super().master(task_type or "worker", task_id or 0, _GRPC)

    def get_master(self) -> str:
        """The older name of `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """The older name of `task_type`."""
        return self.task_type

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """{"TPU": XLA devices of each host}; that all hosts have as many is checked when a strategy joins them."""
        found = self.slice()
        return {"TPU": found.cores_per_host if found else local_cores()}

    def topology(self) -> Topology:
        """MPI's: which rank is on which host is seen when the ranks tell each other their worker ids."""
        return MPIClusterResolver().topology()


def _endpoints(tpu: str | Sequence[str] | None) -> list[str]:
    """["10.0.0.1:8470", …] of what are addresses; none of a name."""
    listed = tpu or ()
    if isinstance(tpu, str):
        # A TPU's name has letters, digits and hyphens; "local" looks like one.
        if re.fullmatch(r"(?!localhost\Z)[a-zA-Z0-9-]*", tpu):
            return []
        listed = tpu.split(",")
    found = [_endpoint(address) for address in listed]
    if len(set(found)) < len(found):
        raise ValueError(f"tpu={tpu!r:.200} names a host twice")
    return found


def _endpoint(address: str) -> str:
    bare = address.strip().removeprefix(f"{_GRPC}://") if isinstance(address, str) else ""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::([0-9]{1,5}))?", bare)
    if not match or int(match[2] or _PORT) > 65535:
        raise ValueError(
            f"tpu: {address!r:.80} is no address of a TPU host: expected such as '10.0.0.1:8470'"
        )
    return f"{match[1]}:{match[2] or _PORT}"
