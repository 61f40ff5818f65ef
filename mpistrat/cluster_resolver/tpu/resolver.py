"""A resolver for the hosts of a TPU slice. MPI starts the ranks on the hosts and numbers them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpistrat.cluster_resolver.cluster_resolver import ClusterResolver, host_of
from mpistrat.cluster_resolver.cluster_spec import ClusterSpec
from mpistrat.cluster_resolver.mpi import MPIClusterResolver
from mpistrat.cluster_resolver.tpu.discovery import discover_slice
from mpistrat.cluster_resolver.tpu.slice import TPUSlice
from mpistrat.topology import Topology

_LOCAL = "local"
_GRPC = "grpc"
_PORT = 8470  # TensorFlow's port of a host; nobody connects to it here
_DEVICES = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"  # Google's PCI vendor id
_CORES = {  # number of XLA devices, by PCI device id
    "0x0027": 2,  # v2, v3
    "0x005e": 1,  # v4
    "0x0062": 1,  # v5p
    "0x0063": 1,  # v5e
    "0x006f": 1,  # v6e
    "0x0076": 1,  # half a chip of v7x
}


class TPUClusterResolver(ClusterResolver):
    """Finds the hosts of the TPU slice (linked TPU chips) that contains this host.

    The constructor reads nothing. The first use of a member that needs the slice reads GKE's variables, or asks
    Google's metadata server for a few seconds at most. Unlike tf.distribute's resolver, this class does not use the
    Cloud TPU API (credentials, service, discovery_url), and starts no server for a coordinator without an address.

    Args:
        tpu: the slice. None or "": the slice of this host, from GKE's variables or the metadata server. "local": only
            the chips of this host. A name: this host's TPU must have this name. Addresses of all hosts by worker id (a
            host's number in the slice), in a list or separated by commas ("10.0.0.1:8470,grpc://10.0.0.2"): are used
            instead of the addresses that are found.
        zone, project: the zone and the project that the TPU must have; None or "" allows any.
        job_name: the job of the hosts in `cluster_spec`.
        coordinator_name, coordinator_address: the name and the address of another job with one task; None for none.
        environ: variables to read instead of the process's environment.
    Raises: ValueError if an address cannot be read or is given twice, or if `coordinator_name` is missing. The members
        raise NotFoundError if this is no TPU host. They raise ValueError if the facts about the slice contradict each
        other, or if this host belongs to another TPU, zone or project.

    Example:
        >>> variables = {"TPU_ACCELERATOR_TYPE": "v2-8", "TPU_WORKER_ID": "0"}
        >>> resolver = ms.cluster_resolver.TPUClusterResolver(environ=variables)
        >>> resolver.slice().chips_per_host, resolver.num_accelerators(), resolver.master()
        (4, {'TPU': 8}, 'grpc://localhost:8470')
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['localhost:8470']})

    Example, on a TPU::

        resolver = ms.cluster_resolver.TPUClusterResolver()
        print(resolver.get_master(), resolver.get_job_name(), resolver.topology().rank)
        strategy = ms.TPUStrategy(resolver)
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
        name = None if self._endpoints else tpu
        self._asked = {"name": name, "zone": zone, "project": project}

    def slice(self) -> TPUSlice | None:
        """Return the slice of this host, and the host's worker id in it.

        Returns: None for "local"; the caller then sets no variables, and PJRT finds the host's chips itself.

        Raises: NotFoundError if this is no TPU host; ValueError if the facts about the slice contradict each other or
            the constructor's `tpu`, `zone` or `project`.
        """
        return None if self._local else self._slice

    @functools.cached_property
    def _slice(self) -> TPUSlice:
        found = discover_slice(self._environ, [host_of(e) for e in self._endpoints])
        for what, asked in self._asked.items():
            actual = getattr(found, what)
            if asked and actual not in ("", asked):
                raise ValueError(
                    f"TPUClusterResolver: {what}={asked!r:.80}, but this host belongs to a "
                    f"{found.accelerator_type} whose {what} is {actual!r:.80}: start the ranks on the hosts of "
                    f"{asked!r:.80}, or leave {what} out"
                )
        return found

    def cluster_spec(self) -> ClusterSpec:
        """Return a cluster with a task for each host, by worker id, and the coordinator's job.

        Returns: the empty cluster for "local".
        """
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
        """Return "grpc://" and the address of a task; '' for "local".

        Without a type or an id, it is the task of the attributes `task_type` and `task_id`: the first host, unless the
        program has set `task_id`.
        Raises: ValueError if there is no such task.
        """
        if self._local:
            return ""
        if None in (task_type, task_id):
            task_type = self.task_type
            task_id = self.task_id
        return super().master(task_type or "worker", task_id or 0, _GRPC)

    def get_master(self) -> str:
        """Return `master()`. This is the older name of that method."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return `task_type`. This is the older name of that attribute."""
        return self.task_type

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Return {"TPU": number of XLA devices (cores) of this host}; 0 if "local" finds no TPU chip."""
        found = self.slice()
        if found:
            return {"TPU": found.cores_per_host}
        return {"TPU": local_cores()}

    def topology(self) -> Topology:
        """Return MPI's topology, because MPI numbers the ranks. The order of the slice's hosts has no effect."""
        return MPIClusterResolver().topology()


def _endpoints(tpu: str | Sequence[str] | None) -> list[str]:
    """Return the addresses in the constructor's argument `tpu`, such as ["10.0.0.1:8470"].

    Returns: [] if `tpu` is a name, "local" or empty.
    Raises: ValueError if an address cannot be read, or is given twice.
    """
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


def local_cores(devices: Path = _DEVICES) -> int:
    """Return the number of XLA devices (cores) of this host's TPU chips; 0 if the host has no known TPU chip.

    Args: devices: the folder of sysfs with an entry for each PCI device.
    """
    found = 0
    for device in devices.glob("*"):
        with contextlib.suppress(OSError):  # the device was just removed, or may not be read
            if (device / "vendor").read_text().strip() == _GOOGLE:
                found += _CORES.get((device / "device").read_text().strip(), 0)
    return found
