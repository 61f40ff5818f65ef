"""Device names."""

import os
import sys
import threading
import types
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.machine.devices import (
    check_device,
    check_devices,
    nccl_that_outlives_errors,
    num_accelerators,
    seen_accelerators,
    share_all,
    share_out,
)


@pytest.mark.parametrize(
    ("spelling", "spelt"),
    [
        ("cpu", "cpu:0"),
        ("CPU:1", "cpu:1"),
        ("/cpu:2", "cpu:2"),
        ("/device:CPU:0", "cpu:0"),
        ("/job:worker/replica:0/task:0/device:CPU:3", "cpu:3"),
    ],
)
def test_spellings(spelling, spelt):
    assert check_device(spelling) == spelt


@pytest.mark.parametrize(
    "bad", ["", "cpu:", "cpu:x", "cpu:-1", "disk:0", "cpu:0 ", None, 0, "tpu:0"]
)
def test_what_is_no_device(bad):
    with pytest.raises(ValueError, match="expected a device"):
        check_device(bad)


def torch_with(kind, count, module=None):
    """The part of torch that is asked for accelerators."""
    device = types.SimpleNamespace(type=kind) if count else None
    accelerator = types.SimpleNamespace(
        current_accelerator=lambda check_available: device, device_count=lambda: count
    )
    return types.SimpleNamespace(accelerator=accelerator, get_device_module=lambda kind: module)


@pytest.fixture
def two_gpus(monkeypatch):
    cuda = types.SimpleNamespace(
        get_device_properties=lambda i: types.SimpleNamespace(uuid=f"8932f937-{i}")
    )
    monkeypatch.setitem(sys.modules, "torch", torch_with("cuda", 2, cuda))


def test_gpus_are_counted(two_gpus):
    assert num_accelerators() == 2
    assert check_device("GPU:1") == "cuda:1"
    assert check_devices(["gpu:0", "cuda:1"]) == ("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match=r"sees 2 cuda devices$"):
        check_device("cuda:2")
    with pytest.raises(AssertionError, match="distinct"):
        check_devices(["gpu:0", "cuda:0"])


def test_gpus_have_names(two_gpus):
    assert seen_accelerators() == ("8932f937-0", "8932f937-1")


def test_each_kind_that_torch_reports_counts(monkeypatch):
    """One without identifiers has its number."""
    monkeypatch.setitem(sys.modules, "torch", torch_with("npu", 3, types.SimpleNamespace()))
    assert check_device("gpu:2") == check_device("npu:2") == "npu:2"
    assert seen_accelerators() == ("npu 0", "npu 1", "npu 2")
    for absent in ("npu:3", "cuda:0"):
        with pytest.raises(ValueError, match=f"{absent}' does not exist: .* sees 3 npu devices$"):
            check_device(absent)
    with pytest.raises(ValueError, match="expected a device"):
        check_device("xpu:0")


def test_without_gpus(monkeypatch):
    for module in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert num_accelerators() == 0
    assert seen_accelerators() == ()
    with pytest.raises(ValueError, match=r"sees no GPUs\. Import torch, or cupy, before"):
        check_device("gpu:0")


A, B, C, D = "ABCD"


@pytest.mark.parametrize(
    ("seen", "numbers"),
    [
        ([(A, B, C, D)] * 4, [0, 1, 2, 3]),  # mpirun, or srun --gpus-per-node
        ([(A, B)] * 5, [0, 1, 0, 1, 0]),  # more ranks than GPUs
        ([(A, B, C, D)] * 2, [0, 1]),  # fewer
        ([(A,), (B,), (C,), (D,)], [0, 0, 0, 0]),  # --gpus-per-task=1: each sees its own as number 0
        ([(A, B), (C, D)], [0, 0]),  # --gpus-per-task=2
        ([(A,), (A,), (B,), (B,)], [0, 0, 0, 0]),  # --gpu-bind=map_gpu:0,0,1,1: shared, although two are there
        ([(A, B), (A, B), (C, D), (C, D)], [0, 1, 0, 1]),  # --gpu-bind=closest: those of the rank's socket
        ([(B, A), (A, B)], [0, 0]),  # the same two, numbered differently
        ([(A, B), (A,)], [1, 0]),  # one rank has a choice, the other has none
        ([(A, B), (A, C), (A,)], [1, 1, 0]),
        ([(A,), (A,), (A, B, C), (A, B, C)], [0, 0, 1, 2]),  # a crowd on A does not crowd B and C
        ([(), (A, B), ()], [None, 0, None]),  # some ranks without
        ([], []),
    ],
)  # fmt: skip
def test_the_ranks_of_a_node_share_its_gpus(seen, numbers):
    assert share_out(seen) == numbers


@given(st.lists(st.lists(st.sampled_from("ABCDE"), unique=True), max_size=8))
def test_no_gpu_has_two_ranks_while_another_could_take_one(seen):
    numbers = share_out(seen)
    users = Counter(own[n] for own, n in zip(seen, numbers, strict=True) if n is not None)
    assert all((n is None) == (not own) for own, n in zip(seen, numbers, strict=True))
    # The most that could have a GPU of their own, by trying: each rank takes any that is left.
    most = {frozenset()}
    for own in seen:
        most |= {taken | {gpu} for taken in most for gpu in set(own) - taken}
    assert len(users) == max(map(len, most))


@pytest.mark.parametrize(
    ("seen", "numbers"),
    [
        (["ABCD"], [[0, 1, 2, 3]]),
        (["ABCD"] * 2, [[0, 2], [1, 3]]),
        (["ABC"] * 2, [[0], [1]]),
        (["AB", "CD"], [[0, 1], [0, 1]]),
        (["A", "AB"], [[0], [1]]),
        (["A", "A"], [[0], [0]]),
        ([[], "AB"], [[], [0]]),
        ([[]], [[]]),
    ],
)
def test_ranks_take_equally_many_of_all_accelerators(seen, numbers):
    assert share_all(seen) == numbers


@pytest.mark.parametrize("other_library", ["nothing", "torch without CUDA"])
def test_cupy_counts_too(monkeypatch, other_library):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    if other_library != "nothing":
        monkeypatch.setitem(sys.modules, "torch", torch_with("cuda", 0))
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 3)
    device = lambda i: types.SimpleNamespace(pci_bus_id=f"0000:0{i}:00.0")  # noqa: E731
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime, Device=device))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert num_accelerators() == 3
    assert seen_accelerators() == ("0000:00:00.0", "0000:01:00.0", "0000:02:00.0")


def test_what_is_set_for_groups_of_ours_is_not_for_those_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_nccl() -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name.startswith("TORCH_NCCL")}

    for name in of_nccl():
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")  # the user's
    with nccl_that_outlives_errors():
        assert of_nccl() == {
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
        }
    assert of_nccl() == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "1")  # the older name, which torch reads, too
    with nccl_that_outlives_errors():
        assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_a_group_that_is_made_while_another_is_made_outlives_errors() -> None:
    seen: list[str | None] = []

    def make() -> None:
        with nccl_that_outlives_errors():
            with nccl_that_outlives_errors():
                pass
            seen.append(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"))

    thread = threading.Thread(target=make, daemon=True)  # which a lock would stop for ever
    thread.start()
    thread.join(5)
    assert seen == ["100"]
    assert "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in os.environ


def test_groups_that_threads_make_at_the_same_time_outlive_errors() -> None:
    """A constructor that fails leaves no variable behind, and takes none from the next one."""
    has_failed, seen = threading.Event(), []

    def make() -> None:
        with nccl_that_outlives_errors():
            has_failed.wait(5)
            seen.append(os.environ.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"))

    thread = threading.Thread(target=make)

    def fail() -> None:
        with nccl_that_outlives_errors():
            thread.start()
            thread.join(0.05)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    has_failed.set()
    thread.join()
    assert seen == ["100"]
    assert "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC" not in os.environ
