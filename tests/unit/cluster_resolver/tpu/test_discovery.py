"""The slice that variables and a metadata server describe."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster_resolver.tpu.discovery import discover_slice, parse_tpu_env
from mpistrat.cluster_resolver.tpu.slice import TPUSlice
from mpistrat.errors import NotFoundError
from support.cloud.google_metadata import metadata_server

VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_ACCELERATOR_TYPE": "v4-16",
    "TPU_HOST_BOUNDS": "1,1,2",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "w-0.job,w-1.job",
}
# As a v4-16 has it, shortened
TPU_ENV = """ACCELERATOR_TYPE: 'v4-16'
AGENT_BOOTSTRAP_IMAGE: 'gcr.io/cloud-tpu-v2-images/instance_agent:stable'
ALT: 'false'
CHIPS_PER_HOST_BOUNDS: '2,2,1'
CONSUMER_PROJECT_ID: 'some-project'
HOST_BOUNDS: '1,1,2'
INJECT_SLICE_BUILDER_FAULT: ''
NODE_ID: 'pod-1'
TPU_CHIPS_PER_PROCESS_BOUNDS: '2,2,1'
TPU_PROCESS_BOUNDS: '1,1,2'
WORKER_ID: '1'
ZONE: 'us-central2-b'
"""
METADATA = {
    "instance/attributes/tpu-env": TPU_ENV,
    "instance/attributes/worker-network-endpoints": (
        "t1v-n-0f996b37-w-0:12345:10.130.0.26,t1v-n-0f996b37-w-1:12346:10.130.0.25"
    ),
    "instance/attributes/accelerator-type": "v4-16",
    "instance/attributes/agent-worker-number": "1",
}
TOP = Path(__file__).parents[4]


def test_variables():
    found = discover_slice(VARIABLES)
    assert found == TPUSlice("v4-16", (1, 1, 2), (2, 2, 1), 1, ("w-0.job", "w-1.job"))


def test_the_order_of_variables_is_that_of_torch_xla():
    """The example of its published tests."""
    found = discover_slice(
        {
            **VARIABLES,
            "TPU_ACCELERATOR_TYPE": "v4-32",
            "TPU_PROCESS_BOUNDS": "1,2,2",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1",
            "CLOUD_TPU_TASK_ID": "1",
            "TPU_WORKER_ID": "0",
            "TPU_WORKER_HOSTNAMES": "a,b,c,d",
        }
    )
    assert (found.host_bounds, found.chips_per_host_bounds) == ((1, 2, 2), (2, 2, 1))
    assert found.worker_id == 1


def test_the_accelerator_type_alone_says_that_variables_count():
    rest = {key: value for key, value in VARIABLES.items() if key != "TPU_SKIP_MDS_QUERY"}
    assert discover_slice(rest) == discover_slice(VARIABLES)


def test_addresses_that_the_user_knows():
    rest = {key: value for key, value in VARIABLES.items() if key != "TPU_WORKER_HOSTNAMES"}
    assert discover_slice(rest, ["a", "b"]).addresses == ("a", "b")
    assert discover_slice(VARIABLES, ["a", "b"]).addresses == ("a", "b")
    with pytest.raises(ValueError, match=r"3 addresses .* for the 2 hosts of a v4-16"):
        discover_slice(VARIABLES, ["a", "b", "c"])


def test_one_host_needs_no_address():
    alone = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0"}
    alone["TPU_CHIPS_PER_HOST_BOUNDS"] = "2,2,1"
    assert discover_slice(alone).addresses == ()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TPU_ACCELERATOR_TYPE", r"accelerator type \(TPU_ACCELERATOR_TYPE\)"),
        ("TPU_HOST_BOUNDS", r"bounds of hosts \(TPU_PROCESS_BOUNDS or TPU_HOST_BOUNDS\)"),
        ("TPU_CHIPS_PER_HOST_BOUNDS", "bounds of each host's chips"),
        ("TPU_WORKER_ID", r"worker id \(CLOUD_TPU_TASK_ID or TPU_WORKER_ID\)"),
    ],
)
def test_a_variable_that_is_missing(name, words):
    rest = {key: value for key, value in VARIABLES.items() if key != name}
    with pytest.raises(NotFoundError, match=f"no TPU found: .* do not tell the {words}"):
        discover_slice(rest)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("TPU_HOST_BOUNDS", "1x1x2", "environment, bounds of hosts: .* got '1x1x2'"),
        ("TPU_WORKER_ID", "first", "the worker id 'first' is no number"),
        ("TPU_ACCELERATOR_TYPE", "tpu", "'tpu' is no accelerator type"),
        ("TPU_WORKER_HOSTNAMES", "", "0 addresses"),
    ],
)
def test_a_variable_that_cannot_be(name, text, words):
    with pytest.raises(ValueError, match=words):
        discover_slice({**VARIABLES, name: text})


JUNK = st.one_of(
    st.sampled_from(["", " ", "-1", "1,1", "0,0,0", "٢,1,1", "²", "\x00", "\udcff", "9" * 5000]),
    st.sampled_from(["v4", "v4-", "v-16", "4-16", "v99-16", "v4-9999999", ",", ",,a", "a,a"]),
    st.text(max_size=8),
)


@given(st.dictionaries(st.sampled_from(sorted(VARIABLES)), JUNK, min_size=1))
def test_damaged_variables(junk):
    """The slice as it is, but for what can be of its kind, or an error that says what is wrong."""
    environ = {**VARIABLES, "GCE_METADATA_HOST": "127.0.0.1:1", **junk}
    found, error = None, ""
    try:
        found = discover_slice(environ)
    except (ValueError, NotFoundError) as why:
        error = str(why)
    assert len(error) < 1200  # whatever it quotes
    if found is not None:
        assert (found.num_hosts, found.chips_per_host, len(found.addresses)) == (2, 4, 2)


@pytest.fixture
def server():
    with metadata_server(METADATA) as server:
        yield server


EXPECTED = TPUSlice(
    "v4-16",
    (1, 1, 2),
    (2, 2, 1),
    1,
    ("10.130.0.26", "10.130.0.25"),
    "pod-1",
    "us-central2-b",
    "some-project",
)


def test_metadata(server):
    assert discover_slice(server.environ) == EXPECTED
    assert server.asked == [
        "instance/attributes/tpu-env",
        "instance/attributes/worker-network-endpoints",
    ]


def test_attributes_that_stand_in_for_lines(server):
    kept = [
        line for line in TPU_ENV.splitlines() if not line.startswith(("ACCEL", "WORKER", "TPU_"))
    ]
    server.values = {**METADATA, "instance/attributes/tpu-env": "\n".join(kept)}
    assert discover_slice(server.environ) == EXPECTED


def test_older_generations_tell_no_bounds(server):
    server.values = {
        "instance/attributes/accelerator-type": "v3-32",
        "instance/attributes/agent-worker-number": "3",
        "instance/attributes/worker-network-endpoints": "a:1:h0,b:2:h1,c:3:h2,d:4:h3",
    }
    found = discover_slice(server.environ)
    assert found == TPUSlice("v3-32", (2, 2, 1), (2, 2, 1), 3, ("h0", "h1", "h2", "h3"))
    assert len(set(server.asked)) == len(server.asked)  # nothing twice


def test_a_virtual_machine_without_a_tpu(server):
    server.values = {}
    with pytest.raises(NotFoundError, match="metadata server do not tell the accelerator type"):
        discover_slice(server.environ)


def test_no_metadata_server():
    with pytest.raises(NotFoundError) as error:
        discover_slice({"GCE_METADATA_HOST": "127.0.0.1:1"})
    for words in (
        "no TPU found",
        "TPU_SKIP_MDS_QUERY nor TPU_ACCELERATOR_TYPE is set",
        "http://127.0.0.1:1/computeMetadata/v1/instance/attributes/tpu-env",
        "refused",
        "PJRT_DEVICE=CPU",
    ):
        assert words in str(error.value)


def test_lines_of_tpu_env():
    text = "A: 'x'\n  B: \"y: z\"\nC: 1,2\n\n# no line\nD: ''\nE: 'it''s'\nF-G : h\n"
    assert parse_tpu_env(text) == {
        "A": "x",
        "B": "y: z",
        "C": "1,2",
        "D": "",
        "E": "it's",
        "F-G": "h",
    }


def test_the_own_environment_is_read_before_pjrt_s_variables_are_set():
    program = (
        "from mpistrat.cluster_resolver.tpu.pjrt import pjrt_environment, set_pjrt_environment\n"
        "from mpistrat.cluster_resolver.tpu.discovery import discover_slice\n"
        "from mpistrat.topology import Topology\n"
        "found = discover_slice()\n"
        "set_pjrt_environment(pjrt_environment(Topology(3, 4, (0,) * 4), [found] * 4))\n"
        "assert discover_slice() == found, discover_slice()\n"
        "import os; print(os.environ['TPU_PROCESS_BOUNDS'])\n"
    )
    environment = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_PROCESS_BOUNDS": "1,1,1"}
    environment |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1", "TPU_WORKER_ID": "0"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TOP,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "2,2,1\n", result.stderr
