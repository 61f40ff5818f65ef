"""What is read from a metadata server, and how soon it is known that there is none."""

import socket
import threading
import time

import pytest

from mpistrat.cluster_resolver.metadata_server import read_metadata
from mpistrat.fault_tolerance.termination_config import maintenance_is_near
from support.cloud.google_metadata import metadata_server

MODULE = "mpistrat.cluster_resolver.metadata_server"
PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"


@pytest.fixture
def server():
    with metadata_server({PREEMPTED: "FALSE", MAINTENANCE: "NONE"}) as server:
        yield server


def test_values_and_missing_ones(server):
    assert read_metadata(PREEMPTED, server.environ) == "FALSE"
    assert read_metadata("instance/attributes/tpu-env", server.environ) is None
    assert server.asked == [PREEMPTED, "instance/attributes/tpu-env"]


def test_the_host_comes_before_the_address(server):
    port = server.environ["GCE_METADATA_HOST"]
    assert read_metadata(PREEMPTED, {"GCE_METADATA_IP": port}) == "FALSE"
    both = {"GCE_METADATA_HOST": port, "GCE_METADATA_IP": "127.0.0.1:1"}
    assert read_metadata(PREEMPTED, both) == "FALSE"


def test_no_proxy_is_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    assert read_metadata(PREEMPTED, server.environ) == "FALSE"


def test_a_busy_server_is_asked_again(server):
    server.busy = 2
    assert read_metadata(PREEMPTED, server.environ) == "FALSE"
    server.busy = 3
    with pytest.raises(OSError, match="instance/preempted: HTTP Error 503"):
        read_metadata(PREEMPTED, server.environ)
    assert len(server.asked) == 6


def test_refused_without_its_header(server):
    server.wanted = "another"
    with pytest.raises(OSError, match="HTTP Error 403: Forbidden"):
        read_metadata(PREEMPTED, server.environ)
    assert len(server.asked) == 1


def test_another_server_at_that_address(server):
    server.flavor = "Hotel"
    with pytest.raises(OSError, match="not from Google's metadata server"):
        read_metadata(PREEMPTED, server.environ)


def test_a_slow_server(server, monkeypatch):
    server.seconds = 1.0
    assert read_metadata(PREEMPTED, server.environ) == "FALSE"
    server.seconds = 60.0
    monkeypatch.setattr(f"{MODULE}._SECONDS_PER_TRY", 0.3)
    began = time.monotonic()
    with pytest.raises(OSError, match=r"instance/preempted: .*(timed out|no answer within)"):
        read_metadata(PREEMPTED, server.environ)
    assert time.monotonic() - began < 30


def test_an_answer_that_never_ends(monkeypatch):
    """Each byte comes in time, and the whole never."""
    monkeypatch.setattr(f"{MODULE}._SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environ = {"GCE_METADATA_HOST": f"127.0.0.1:{listener.getsockname()[1]}"}

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                head = b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 9999\r\n\r\n"
                connection.sendall(head)
                for _ in range(20):
                    connection.sendall(b"x")
                    time.sleep(0.5)

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(OSError, match="no answer within 2 s"):
            read_metadata(PREEMPTED, environ)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "metadata.invalid", "not a host"])
def test_no_server(host):
    began = time.monotonic()
    with pytest.raises(OSError, match=f"http://{host}/computeMetadata/v1/instance/preempted: "):
        read_metadata(PREEMPTED, {"GCE_METADATA_HOST": host})
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("what", "text"), [(PREEMPTED, "TRUE\n"), (MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_the_end_of_a_virtual_machine(server, monkeypatch, what, text):
    monkeypatch.setenv("GCE_METADATA_HOST", server.environ["GCE_METADATA_HOST"])
    assert not maintenance_is_near()
    server.values = {**server.values, what: text}
    assert maintenance_is_near()
    server.values = {}
    assert not maintenance_is_near()
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    with pytest.raises(OSError, match="refused"):
        maintenance_is_near()
