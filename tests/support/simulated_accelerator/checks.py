"""Tests of the simulator, for a pytest of their own: who has loaded it once has an accelerator for good.

tests/unit/harness/test_simulated_accelerator.py runs them.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn import functional

from support.simulated_accelerator import process_group

UNORDERED = "without having waited for it"
DEVICE = "sim:0"


@pytest.fixture
def recorded(sim: Any) -> Any:
    """Violations of this test are kept, and do not raise."""
    sim.raise_violations(False)
    yield sim
    sim.raise_violations(True)


@pytest.fixture(autouse=True)
def no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted group ends at once: these tests wait for nothing that its watchdog does."""
    monkeypatch.setattr(process_group, "SECONDS_OF_A_WATCHDOG", 0.0)


# Numbers


def train(device: str, make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(device)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(10):
        images = torch.randn(16, 1, 12, 12)
        labels = torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    ],
    ids=["SGD", "Adam"],
)
def test_a_cnn_trains_to_the_losses_of_the_cpu(sim: Any, make: Any) -> None:
    assert train("cpu", make) == train("sim:0", make) == train("sim:1", make)


@pytest.mark.parametrize(
    "inputs", [torch.tensor([[1, 2, 1]]), torch.randn(5, 2, 3)], ids=["sparse", "LSTM"]
)
def test_sparse_gradients_and_fused_cells(sim: Any, inputs: torch.Tensor) -> None:
    ours: Any = nn.Embedding(5, 3, sparse=True)
    if inputs.is_floating_point():
        ours = nn.LSTM(3, 4)
    theirs = copy.deepcopy(ours).to(DEVICE)
    for model, device in ((ours, "cpu"), (theirs, DEVICE)):
        output = model(inputs.to(device))
        if isinstance(output, tuple):  # an LSTM's, which has its last state, too
            output = output[0]
        output.square().sum().backward()
    for here, there in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(there.grad.cpu().to_dense(), here.grad.to_dense())


def test_generators_are_the_devices_own(sim: Any) -> None:
    def numbers() -> list[float]:
        return torch.rand(2, device=DEVICE).tolist()

    torch.manual_seed(3)
    state = sim.get_rng_state(0)
    on_host = torch.get_rng_state()
    first = numbers()
    assert torch.equal(torch.get_rng_state(), on_host)
    sim.set_rng_state(state, 0)
    assert numbers() == first != numbers()


def test_two_devices_and_the_host_do_not_mix(sim: Any) -> None:
    a = torch.ones(2, device="sim:0")
    b = torch.ones(2, device="sim:1")
    for other in (b, b.cpu()):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            a + other
    assert b.copy_(a * 5).tolist() == [5.0, 5.0]


# Order


def copied_on(stream: torch.Stream) -> torch.Tensor:
    """What a copy on `stream` brings, by and by."""
    numbers = torch.empty(4, device=DEVICE)
    torch.accelerator.current_stream().synchronize()
    with stream:
        return numbers.copy_(torch.full((4,), 3.0).pin_memory(), non_blocking=True)


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_is_found(recorded: Any, waits: bool) -> None:
    stream = recorded.Stream(DEVICE)
    numbers = copied_on(stream)
    if waits:
        recorded.current_stream().wait_event(stream.record_event())
    doubled = numbers * 2
    assert [UNORDERED in text for text in recorded.violations()] == ([] if waits else [True])
    assert (doubled.tolist() == [6.0] * 4) == waits
    torch.accelerator.synchronize()


def test_a_violation_raises_where_it_happens(sim: Any) -> None:
    numbers = copied_on(sim.Stream(DEVICE))
    with pytest.raises(RuntimeError, match=UNORDERED):
        numbers * 2
    torch.accelerator.synchronize()
    assert len(sim.violations()) == 1


@pytest.mark.parametrize("records", [True, False])
def test_a_missing_record_stream_is_found(recorded: Any, records: bool) -> None:
    stream = recorded.Stream(DEVICE)
    with stream:
        numbers = torch.ones(4, device=DEVICE)
    recorded.current_stream().wait_stream(stream)
    numbers * 2
    if records:
        numbers.record_stream(recorded.current_stream())
    del numbers
    found = recorded.violations()
    assert ["record_stream is missing" in text for text in found] == ([] if records else [True])


def test_a_late_copy_is_seen_by_the_host(sim: Any) -> None:
    ones = torch.ones(3, device=DEVICE)
    copied = ones.to("cpu", non_blocking=True)
    assert copied.isnan().all()
    sim.synchronize()
    assert copied.tolist() == [1.0] * 3
    source = torch.ones(3).pin_memory()
    ones.copy_(source, non_blocking=True)
    source.fill_(9)
    assert ones.tolist() == [9.0] * 3


def test_columns_beside_each_other_are_no_violation(sim: Any) -> None:
    table = torch.zeros(4, 4, device=DEVICE)
    with sim.Stream(DEVICE) as stream:
        stream.wait_stream(sim.default_stream(DEVICE))
        table[:, 0].fill_(1)
    table[:, 1].fill_(2)
    with pytest.raises(RuntimeError, match=UNORDERED):
        table[1:3].fill_(3)
    assert len(sim.violations()) == 1
    sim.synchronize()


def test_the_host_must_have_waited_for_what_it_reads_itself(recorded: Any) -> None:
    numbers = torch.ones(4, device=DEVICE)
    recorded.host_access(numbers, writes=False)
    assert len(recorded.violations()) == 1
    recorded.synchronize()
    recorded.host_access(numbers, writes=True)


# What the host waits for, and memory


def test_waits_of_the_host_are_counted(sim: Any) -> None:
    numbers = torch.ones(4, device=DEVICE)
    event = sim.current_stream().record_event()
    sim.host_waits()
    numbers.add_(1).sum()
    assert sim.host_waits() == []
    event.query()
    event.synchronize()
    numbers.sum().item()
    numbers.cpu()
    sim.synchronize()
    assert sim.host_waits() == ["query", "event", "item", "copy", "device"]
    sim.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="the host waits"):
        numbers.tolist()
    sim.set_sync_debug_mode("default")


def test_a_capture_refuses_waits(sim: Any) -> None:
    event = sim.current_stream().record_event()
    with sim.capture():
        assert sim.is_current_stream_capturing()
        for call in (event.query, event.synchronize, sim.synchronize):
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                call()
    assert not sim.is_current_stream_capturing()


def test_memory_is_measured(sim: Any) -> None:
    before = sim.memory_allocated(1)
    sim.reset_peak_memory_stats(1)
    kept = torch.zeros(1000, device="sim:1")
    del kept
    assert sim.memory_allocated(1) == before
    assert sim.max_memory_allocated(1) == before + 4000


# The native group: two ranks in one process, each on a device of its own


def both(work: Callable[[int], Any]) -> list[Any]:
    """What `work` of ranks 0 and 1 returns, or raises."""
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            torch.accelerator.set_device_index(rank)
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def groups(sim: Any) -> list[Any]:
    store = HashStore()
    made = [sim.ProcessGroupSim(store, rank, 2) for rank in (0, 1)]
    both(lambda rank: made[rank].eager_connect_single_device(torch.device("sim", rank)))
    return made


def test_a_group_orders_by_streams_and_sums(recorded: Any) -> None:
    ranks = groups(recorded)

    def work(rank: int) -> Any:
        numbers = torch.full((3,), rank + 1.0, device=f"sim:{rank}")
        recorded.host_waits()
        ranks[rank].allreduce([numbers]).wait()
        assert recorded.host_waits() == []
        early = torch.zeros(3, device=f"sim:{rank}")
        work = ranks[rank].allreduce([early])
        early + 1  # nobody has waited
        work.wait()
        return numbers.tolist()

    assert both(work) == [[3.0] * 3] * 2
    assert [UNORDERED in text for text in recorded.violations()] == [True, True]
    for group in ranks:
        group.shutdown()


def test_a_group_that_hangs_ends_by_an_abort(sim: Any) -> None:
    ranks = groups(sim)
    sim.faults.add("hang")
    numbers = torch.ones(3, device=DEVICE)
    work = ranks[0].allreduce([numbers])
    work.wait()
    assert not work.is_completed()
    threading.Timer(0.1, ranks[0].abort).start()
    sim.synchronize()
    assert work.is_completed()
    sim.faults.clear()
    with pytest.raises(RuntimeError, match="was aborted on rank 0"):
        ranks[0].allreduce([numbers])
    ranks[1].abort()


def test_a_call_whose_group_is_aborted_as_it_starts_ends(sim: Any) -> None:
    """Another thread aborts the group after the call has seen that nobody has."""
    group, other = groups(sim)
    group.eager_connect_single_device = lambda _: group.abort()
    group.allreduce([torch.ones(3, device=DEVICE)]).wait()
    sim.synchronize()
    other.abort()


def test_a_group_refuses_two_ranks_on_one_device(sim: Any) -> None:
    store = HashStore()
    device = torch.device(DEVICE)
    results = both(
        lambda rank: sim.ProcessGroupSim(store, rank, 2).eager_connect_single_device(device)
    )
    assert ["Duplicate GPU detected" in str(result) for result in results] == [True, True]


def test_a_group_fails_where_it_is_told_to(sim: Any) -> None:
    for fault in ("constructor", "connect"):
        sim.faults.add(fault)
        with pytest.raises(RuntimeError, match="simulated fault"):
            sim.ProcessGroupSim(HashStore(), 0, 1).eager_connect_single_device(DEVICE)
        sim.faults.clear()
