"""PJRT's environment for the ranks of known slices, and of what cannot be one."""

import pytest

from mpistrat.cluster_resolver.tpu.pjrt import asked_device, pjrt_environment, set_pjrt_environment
from mpistrat.cluster_resolver.tpu.slice import TPUSlice, bounds_of_type, parse_bounds
from mpistrat.errors import TopologyError
from mpistrat.topology import Topology

# accelerator type: bounds of hosts, bounds of each host's chips
BOUNDS = {
    "v4-8": ("1,1,1", "2,2,1"),
    "v4-16": ("1,1,2", "2,2,1"),
    "v5litepod-16": ("2,2,1", "2,2,1"),
    "v5p-16": ("1,1,2", "2,2,1"),
    "tpu7x-16": ("1,1,2", "2,2,1"),
}
LOCAL = "localhost:8476,localhost:8477,localhost:8478,localhost:8479"
A = "10.130.0.31:8476,10.130.0.31:8477,10.130.0.31:8478,10.130.0.31:8479"
B = "10.130.0.30:8476,10.130.0.30:8477,10.130.0.30:8478,10.130.0.30:8479"
FOUR = "h0:8476,h0:8477,h0:8478,h0:8479,h1:8476,h1:8477,h1:8478,h1:8479"
FOUR += ",h2:8476,h2:8477,h2:8478,h2:8479,h3:8476,h3:8477,h3:8478,h3:8479"
EIGHT = ",".join(f"{host}:{port}" for host in ("h0", "h1") for port in range(8476, 8484))

# What torch_xla 2.9 leaves in the environment of a process of its own launcher, one per chip; v4-8 and v4-16 are also
# in its published tests. (type, hosts, ranks per host, worker id, local rank): the variables in the order of NAMES.
ONE_PER_CHIP = [
    (("v4-8", ["10.130.0.31"], 4, 0, 0), ("0", "4", "0", "2,2,1", "1,1,1", "0", LOCAL, "8476")),
    (("v4-8", [""], 4, 0, 3), ("3", "4", "3", "2,2,1", "1,1,1", "3", LOCAL, "8479")),
    (
        ("v4-16", ["10.130.0.31", "10.130.0.30"], 4, 1, 0),
        ("0", "4", "4", "2,2,2", "1,1,1", "0", f"{A},{B}", "8476"),
    ),
    (
        ("v4-16", ["10.130.0.31", "10.130.0.30"], 4, 1, 3),
        ("3", "4", "7", "2,2,2", "1,1,1", "3", f"{A},{B}", "8479"),
    ),
    (
        ("v5litepod-16", ["h0", "h1", "h2", "h3"], 4, 2, 1),
        ("1", "4", "9", "4,4,1", "1,1,1", "1", FOUR, "8477"),
    ),
    (
        ("v5p-16", ["10.130.0.31", "10.130.0.30"], 4, 0, 2),
        ("2", "4", "2", "2,2,2", "1,1,1", "2", f"{A},{B}", "8478"),
    ),
    (
        ("tpu7x-16", ["h0", "h1"], 8, 1, 7),
        ("7", "8", "15", "2,2,2,2", "1,1,1", "7", EIGHT, "8483"),
    ),
]
# One process has all chips of its host: the bounds are those of the slice's hosts.
ONE_PER_HOST = [
    (
        ("v4-8", [""], 1, 0, 0),
        ("0", "1", "0", "1,1,1", "2,2,1", "0,1,2,3", "localhost:8476", "8476"),
    ),
    (
        ("v4-16", ["a", "b"], 1, 1, 0),
        ("0", "1", "1", "1,1,2", "2,2,1", "0,1,2,3", "a:8476,b:8476", "8476"),
    ),
    (
        ("v5litepod-16", ["a", "b", "c", "d"], 1, 3, 0),
        (
            *("0", "1", "3", "2,2,1", "2,2,1", "0,1,2,3"),
            *("a:8476,b:8476,c:8476,d:8476", "8476"),
        ),
    ),
    (
        ("v5p-16", ["a", "b"], 1, 0, 0),
        ("0", "1", "0", "1,1,2", "2,2,1", "0,1,2,3", "a:8476,b:8476", "8476"),
    ),
]
NAMES = (
    "PJRT_LOCAL_PROCESS_RANK",
    "PJRT_LOCAL_PROCESS_COUNT",
    "CLOUD_TPU_TASK_ID",
    "TPU_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
)


def a_slice(kind: str = "v4-16", worker_id: int = 0, addresses=("a", "b")) -> TPUSlice:
    hosts, chips = map(parse_bounds, BOUNDS[kind])
    return TPUSlice(kind, hosts, chips, worker_id, tuple(filter(None, addresses)))


def environments(slices: list[TPUSlice], nodes: list[int]) -> list[dict[str, str]]:
    """Of every rank; `nodes[r]` is the node of rank r."""
    topologies = [Topology(rank, len(nodes), tuple(nodes)) for rank in range(len(nodes))]
    return [pjrt_environment(topology, slices) for topology in topologies]


@pytest.mark.parametrize(("rank", "recorded"), ONE_PER_CHIP + ONE_PER_HOST)
@pytest.mark.parametrize("nodes_backwards", [False, True])
def test_recorded_examples(rank, recorded, nodes_backwards):
    kind, addresses, per_host, worker, local_rank = rank
    workers = list(range(len(addresses)))
    if nodes_backwards:  # the node of rank 0 has the last worker id
        workers.reverse()
    slices = [a_slice(kind, w, addresses) for w in workers for _ in range(per_host)]
    nodes = [node for node in range(len(workers)) for _ in range(per_host)]
    found = environments(slices, nodes)[workers.index(worker) * per_host + local_rank]
    assert found == {"PJRT_DEVICE": "TPU", **dict(zip(NAMES, recorded, strict=True))}


def test_ranks_dealt_out_over_the_nodes_in_turn():
    """mpirun --map-by node: the ranks 0, 2, 4 and 6 are on one host, and it is worker 1."""
    slices = [a_slice(worker_id=1 - rank % 2) for rank in range(8)]
    found = environments(slices, [0, 1] * 4)
    assert [environment["CLOUD_TPU_TASK_ID"] for environment in found] == list("40516273")
    assert [environment["TPU_VISIBLE_CHIPS"] for environment in found] == list("00112233")
    assert len({environment["TPU_PROCESS_ADDRESSES"] for environment in found}) == 1


def test_every_process_listens_where_the_others_look_for_it():
    slices = [a_slice(worker_id=worker) for worker in (1, 0) for _ in range(4)]
    for environment, described in zip(environments(slices, [0] * 4 + [1] * 4), slices, strict=True):
        host = described.addresses[described.worker_id]
        listed = environment["TPU_PROCESS_ADDRESSES"].split(",")
        assert (
            listed[int(environment["CLOUD_TPU_TASK_ID"])]
            == f"{host}:{environment['TPU_PROCESS_PORT']}"
        )


def test_what_was_set_is_overwritten():
    environ = {"TPU_PROCESS_BOUNDS": "1,1,2", "HOME": "/"}
    set_pjrt_environment({"TPU_PROCESS_BOUNDS": "2,2,2"}, environ)
    assert environ == {"TPU_PROCESS_BOUNDS": "2,2,2", "HOME": "/"}


@pytest.mark.parametrize(
    ("nodes", "workers", "words"),
    [
        ([0, 0], [0, 0], "2 ranks run on 1 nodes, but a v4-16 has 2 hosts: start 2 ranks, one per"),
        ([0, 0, 1, 1], [0, 0, 1, 1], r"4 ranks run as \[2, 2\] .* 4 chips each: start 2 .*, or 8,"),
        ([0, 1, 1, 1, 1], [0, 1, 1, 1, 1], r"run as \[1, 4\] on the 2 hosts"),
        ([0], [0], "1 ranks run on 1 nodes, but a v4-16 has 2 hosts"),
    ],
)
def test_ranks_that_do_not_fit_the_hosts(nodes, workers, words):
    with pytest.raises(ValueError, match=words):
        environments([a_slice(worker_id=worker) for worker in workers], nodes)


@pytest.mark.parametrize(
    ("nodes", "slices", "words"),
    [
        (
            [0, 1],
            [a_slice(), a_slice()],
            "ranks 0 and 1 run on different nodes.* worker id 0: each",
        ),
        ([0, 0], [a_slice(), a_slice(worker_id=1)], r"ranks \(0, 1\) run on one node.* \[0, 1\]"),
        ([0, 1], [a_slice(), a_slice("v5p-16", 1)], "a host of a v4-16 .* rank 1 of a v5p-16"),
        ([0, 1], [a_slice(), a_slice(worker_id=1, addresses="ac")], "'a', 'b'.*'a', 'c'"),
    ],
)
def test_hosts_that_contradict_each_other(nodes, slices, words):
    for rank in range(2):  # on all ranks alike
        with pytest.raises(TopologyError, match=words):
            pjrt_environment(Topology(rank, 2, tuple(nodes)), slices)


def test_a_description_from_every_rank_is_needed():
    with pytest.raises(ValueError, match="1 descriptions of the slice for 2 ranks"):
        pjrt_environment(Topology(0, 2, (0, 1)), [a_slice()])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accelerator_type": "v4"}, "'v4' is no accelerator type: expected one such as v4-16"),
        ({"accelerator_type": "gpu-8"}, "'gpu-8' is no accelerator type"),
        ({"accelerator_type": "v4-0"}, "'v4-0' is no accelerator type"),
        ({"accelerator_type": "v4-32"}, "v4-32 has 16 chips, but 2 hosts .* of 4 chips .* have 8"),
        ({"accelerator_type": "v5litepod-16"}, "v5litepod-16 has 16 chips, but .* have 8"),
        ({"accelerator_type": "v9-32"}, "v9-32 has 16 or 32 chips, but"),
        ({"host_bounds": (2, 2, 1)}, "v4-16 has 8 chips, but 4 hosts .*2,2,1.* have 16"),
        ({"worker_id": 2}, r"worker id 2 is not one of the 2 hosts of a v4-16, 0\.\.1"),
        ({"worker_id": -1}, "worker id -1"),
        ({"addresses": ("a",)}, r"1 addresses \['a'\] for the 2 hosts"),
        ({"addresses": ()}, "0 addresses"),
    ],
)
def test_slices_that_cannot_be(changes, words):
    fields = {
        "accelerator_type": "v4-16",
        "host_bounds": (1, 1, 2),
        "chips_per_host_bounds": (2, 2, 1),
        "addresses": ("a", "b"),
    }
    TPUSlice(**fields)
    with pytest.raises(ValueError, match=words):
        TPUSlice(**{**fields, **changes})


@pytest.mark.parametrize(
    "text", ["", "2,2", "2,2,1,2", "2x2x1", "2,2,0", "2, 2, 1", "a,b,c", "-1,1,1"]
)
def test_bounds_that_cannot_be_read(text):
    with pytest.raises(ValueError, match="three numbers from 1 on, such as '2,2,1', got"):
        parse_bounds(text)


@pytest.mark.parametrize(
    ("kind", "addresses", "cores"),
    [("v4-8", "", 4), ("v5litepod-16", "abcd", 4), ("v5p-16", "ab", 4), ("tpu7x-16", "ab", 8)],
)
def test_cores_of_a_host(kind, addresses, cores):
    assert a_slice(kind, 0, addresses).cores_per_host == cores


def test_older_generations_have_bounds_by_their_size():
    assert bounds_of_type("v3-8") == ((1, 1, 1), (2, 2, 1))
    assert bounds_of_type("v3-64") == ((2, 4, 1), (2, 2, 1))
    assert bounds_of_type("v2-512") == ((8, 8, 1), (2, 2, 1))
    assert bounds_of_type("v4-8") is None
    assert TPUSlice("v3-8", (1, 1, 1), (2, 2, 1)).cores_per_host == 8


def test_only_devices_that_a_strategy_can_have_may_be_asked_for() -> None:
    assert [asked_device({"PJRT_DEVICE": name}) for name in ("TPU", "CPU", "")] == [
        "TPU",
        "CPU",
        "TPU",
    ]
    assert asked_device({}) == "TPU"
    for wrong in ("cpu", "CUDA"):
        with pytest.raises(ValueError, match=f"must be TPU or CPU, got '{wrong}'"):
            asked_device({"PJRT_DEVICE": wrong})
