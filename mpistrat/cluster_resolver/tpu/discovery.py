"""Finds the TPU slice of this host, from the variables that GKE sets, else from Google's metadata server."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence

from mpistrat.cluster_resolver.metadata_server import HOST, read_metadata
from mpistrat.cluster_resolver.tpu.pjrt import CHIPS_PER_PROCESS_BOUNDS, PROCESS_BOUNDS, TASK_ID
from mpistrat.cluster_resolver.tpu.slice import Bounds, TPUSlice, bounds_of_type, parse_bounds
from mpistrat.errors import NotFoundError
from mpistrat.settings import Environment

SKIP_METADATA = "TPU_SKIP_MDS_QUERY"  # "1", "true": the variables describe the whole slice
ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"  # "v4-16"; if set, TPU_SKIP_MDS_QUERY is not needed
# If there are several names, the first one that is set counts, as in torch_xla.
HOST_BOUNDS = (PROCESS_BOUNDS, "TPU_HOST_BOUNDS")  # "1,1,2"
CHIPS_PER_HOST_BOUNDS = (CHIPS_PER_PROCESS_BOUNDS, "TPU_CHIPS_PER_HOST_BOUNDS")  # "2,2,1"
WORKER_ID = (TASK_ID, "TPU_WORKER_ID")  # "1"
WORKER_HOSTNAMES = "TPU_WORKER_HOSTNAMES"  # "10.0.0.1,10.0.0.2", by worker id

# Paths of the metadata server below instance/attributes/.
TPU_ENV = "tpu-env"  # lines such as ACCELERATOR_TYPE: 'v4-16'
ENDPOINTS = "worker-network-endpoints"  # "t1v-n-0f996b37-w-0:12345:10.130.0.26,…", by worker id
TYPE_ATTRIBUTE = "accelerator-type"  # "v4-16"
WORKER_NUMBER = "agent-worker-number"  # "1"


def discover_slice(environ: Environment | None = None, addresses: Sequence[str] = ()) -> TPUSlice:
    """Return the slice (the group of linked TPU chips) that contains this host.

    Called by: `TPUClusterResolver`, at its first use.
    Args:
        environ: the variables; None is the process's environment, which is read only at the first call, because later
            the strategy sets variables of the same names for PJRT.
        addresses: addresses of all hosts, by worker id (the host's number in the slice); empty to use the addresses
            that are found.
    Raises: NotFoundError, within seconds, if this is no TPU host; ValueError if the facts about the slice contradict
        each other or cannot be read.
    """
    found = _found_once() if environ is None else _found(environ)
    accelerator_type = found.need("accelerator type")
    hosts, chips = bounds_of_type(accelerator_type) or (None, None)
    return TPUSlice(
        accelerator_type,
        found.bounds("bounds of hosts", hosts),
        found.bounds("bounds of each host's chips", chips),
        found.worker_id(),
        tuple(addresses) or found.addresses(),
        found.get("name"),
        found.get("zone"),
        found.get("project"),
    )


class _Found:
    """Reads the facts about the slice, such as "worker id", from one source: the variables, or the metadata server.

    Args:
        source: the source's name, for errors.
        names: for each fact, the names of the source's values for it; the first name that is set counts.
        read: returns the source's text for a name; None or "" if the name is not set.
    """

    def __init__(
        self, source: str, names: Mapping[str, Sequence[str]], read: Callable[[str], str | None]
    ):
        self._source = source
        self._names = names
        self._read = read

    def get(self, what: str) -> str:
        """Return the text of a fact, such as "worker id"; '' if the source does not have the fact."""
        for name in self._names.get(what, ()):
            text = (self._read(name) or "").strip()
            if text:
                return text
        return ""

    def need(self, what: str) -> str:
        if not (value := self.get(what)):
            names = " or ".join(self._names[what])
            raise NotFoundError(
                f"no TPU found: {self._source} do not tell the {what} ({names}). {_FIX}"
            )
        return value

    def bounds(self, what: str, default: Bounds | None) -> Bounds:
        if default is not None and not self.get(what):
            return default
        try:
            return parse_bounds(self.need(what))
        except ValueError as error:
            raise ValueError(f"{self._source}, {what}: {error}") from None

    def worker_id(self) -> int:
        text = self.need("worker id")
        if not re.fullmatch(r"[0-9]{1,6}", text):
            raise ValueError(f"{self._source}: the worker id {text!r:.80} is no number")
        return int(text)

    def addresses(self) -> tuple[str, ...]:
        between_commas = r"[^,\s](?:[^,]*[^,\s])?"  # without the spaces around an address
        return tuple(re.findall(between_commas, self.get("addresses")))


_FIX = (
    "On a TPU virtual machine the metadata server tells it; on GKE, variables do, which have to reach the ranks "
    f"(TPU_*). Elsewhere set {SKIP_METADATA}=1, {ACCELERATOR_TYPE}, {HOST_BOUNDS[1]}, {CHIPS_PER_HOST_BOUNDS[1]}, "
    f"{WORKER_ID[1]} and {WORKER_HOSTNAMES}. Without a TPU, run on the CPU: PJRT_DEVICE=CPU"
)
_VARIABLES = {
    "accelerator type": (ACCELERATOR_TYPE,),
    "bounds of hosts": HOST_BOUNDS,
    "bounds of each host's chips": CHIPS_PER_HOST_BOUNDS,
    "worker id": WORKER_ID,
    "addresses": (WORKER_HOSTNAMES,),
}
_METADATA = {  # names in capitals are keys of lines of tpu-env; other names are paths
    "accelerator type": ("ACCELERATOR_TYPE", TYPE_ATTRIBUTE),
    "bounds of hosts": ("TPU_PROCESS_BOUNDS", "HOST_BOUNDS"),
    "bounds of each host's chips": ("TPU_CHIPS_PER_PROCESS_BOUNDS", "CHIPS_PER_HOST_BOUNDS"),
    "worker id": ("WORKER_ID", WORKER_NUMBER),
    "addresses": (ENDPOINTS,),
    "name": ("NODE_ID",),
    "zone": ("ZONE",),
    "project": ("CONSUMER_PROJECT_ID",),
}


def _found(environ: Environment) -> _Found:
    if environ.get(SKIP_METADATA) or environ.get(ACCELERATOR_TYPE):
        return _Found("the variables of the environment", _VARIABLES, dict(environ).get)

    @functools.cache
    def attribute(name: str) -> str:
        try:
            return read_metadata(f"instance/attributes/{name}", environ) or ""
        except OSError as error:
            raise NotFoundError(
                f"no TPU found: neither {SKIP_METADATA} nor {ACCELERATOR_TYPE} is set, and Google's metadata server "
                f"({HOST}) does not answer: {error}. {_FIX}"
            ) from error

    def read(name: str) -> str | None:
        if name == ENDPOINTS:
            endpoints = attribute(name).split(",")
            return ",".join(endpoint.split(":", 2)[-1] for endpoint in endpoints)
        if name.isupper():
            return lines.get(name)
        return attribute(name)

    lines = parse_tpu_env(attribute(TPU_ENV))
    return _Found("the attributes of the metadata server", _METADATA, read)


@functools.cache
def _found_once() -> _Found:
    return _found(dict(os.environ))


def parse_tpu_env(text: str) -> dict[str, str]:
    """Return a dict of the lines KEY: 'value' in the metadata server's YAML text tpu-env. Other lines are skipped."""
    lines = re.findall(r"""^\s*([\w-]+)\s*:\s*(?:'(.*)'|"(.*)"|(.*?))\s*$""", text, re.MULTILINE)
    return {key: single.replace("''", "'") or double or bare for key, single, double, bare in lines}
