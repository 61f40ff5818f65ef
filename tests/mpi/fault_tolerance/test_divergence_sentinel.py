"""The sentinel says what differs first, where, and on which rank; on all ranks, and only when something does."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import mpistrat as ms
from mpistrat.errors import DivergenceError
from mpistrat.fault_tolerance import DivergenceSentinel
from support.rank_errors import assert_usable, errors_of_ranks
from support.training.whole_batch import (
    FEATURES,
    batches,
    build,
    loss_of,
    own,
    plain_step,
    replica_id,
)

FLOAT64_BIT = 1 << 40

pytestmark = pytest.mark.usefixtures("drifting")


class Net(torch.nn.Module):
    """The last layer is large enough for several rows of a digest."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = torch.nn.Linear(FEATURES, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.layer2 = torch.nn.Linear(6, 2)
        self.wide = torch.nn.Linear(2, 5000, bias=False)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.layer1(x)) * self.table[:6]
        return self.layer2(hidden) + 1e-3 * self.wide(self.layer2(hidden)).sum(1, keepdim=True)


def net_without_norm() -> torch.nn.Module:
    """For replicas with a batch of one example, which batch norm refuses."""
    net = Net()
    net.norm = torch.nn.Identity()  # type: ignore[assignment]
    return net


class Training:
    def __init__(
        self,
        strategy: ms.Strategy,
        optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam,
        make: Callable[[], torch.nn.Module] = Net,
    ) -> None:
        self.strategy = strategy
        self.net: Any = build(strategy, make)
        self.optimizer = optimizer(self.net.parameters())
        self.batches = batches()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            x, y = next(self.batches)
            self.strategy.run(lambda x, y: plain_step(self.net, self.optimizer, x, y), (x, y))


def rank_of(strategy: ms.Strategy) -> int:
    return int(strategy.extended.communicator.rank)


def ranks(strategy: ms.Strategy) -> int:
    return int(strategy.extended.communicator.size)


def last(strategy: ms.Strategy) -> int:
    """The rank that is poked: not the one that a comparison begins with."""
    return ranks(strategy) - 1


def poke(tensor: torch.Tensor, index: int = 0) -> None:
    """Flip a bit, which torch does not hear of."""
    tensor.data.view(-1).view(torch.int64)[index] ^= FLOAT64_BIT


def assert_told(
    strategy: ms.Strategy,
    call: Callable[[], Any],
    name: str,
    *parts: str,
    k_may_differ: bool = False,
) -> None:
    """`call` raises DivergenceError for `name` on all ranks, with the same text; with one copy there is no other."""
    errors = errors_of_ranks(call)
    if ranks(strategy) == 1 and not (k_may_differ and strategy.num_replicas_in_sync > 1):
        assert errors == [("", "", "")]
        return
    assert {kind for kind, _, _ in errors} == {"DivergenceError"}, errors
    (text,) = {text for _, text, _ in errors}
    assert text.startswith(f"{name} is not the same any more on all ranks"), text
    for part in parts:
        assert part in text, (part, text)
    if ranks(strategy) > 2:
        assert f"rank {last(strategy)}: " in text or f"(rank {last(strategy)})" in text
        assert f"what is wrong is probably rank {last(strategy)} (node " in text
    elif ranks(strategy) == 2 and not k_may_differ:
        assert "Which copy is wrong cannot be known" in text


def test_nothing_is_told_while_all_is_equal(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    with strategy.scope():
        ms.Variable(np.ones(3))
    training.step(6)
    training.net.eval()
    assert_usable(strategy)


def test_one_element_of_a_parameter(strategy: ms.Strategy) -> None:
    sentinel = DivergenceSentinel(strategy, every=2)
    training = Training(strategy)
    training.step(3)
    before = float(training.net.layer2.weight.detach()[1, 3])
    if rank_of(strategy) == last(strategy):
        with torch.no_grad():
            training.net.layer2.weight[1, 3] += 0.5
            training.net.wide.weight[4999, 1] += 1
    assert_told(
        strategy,
        training.step,
        "Net.layer2.weight",
        "1 of 12 elements, most at [1, 3]: ",
        f"{before:.9g}",
        "(float64[2, 6])",
        "in call 4 of backward(); all was equal in call 2 of backward()",
        "2 of ",
        "Net.wide.weight",
    )
    strategy.mirror(training.net)
    sentinel.check()
    assert_usable(strategy)


def test_the_error_names_tensor_and_ranks(strategy: ms.Strategy) -> None:
    sentinel = DivergenceSentinel(strategy)
    net = build(strategy, Net)
    if rank_of(strategy) == last(strategy):
        poke(net.layer1.bias, 5)  # type: ignore[arg-type, union-attr]
    if ranks(strategy) == 1:
        sentinel.check()
        return
    with pytest.raises(DivergenceError) as caught:
        sentinel.check()
    assert caught.value.name == "Net.layer1.bias"
    assert caught.value.ranks == ((last(strategy),) if ranks(strategy) > 2 else ())


def test_two_against_two(strategy: ms.Strategy) -> None:
    sentinel = DivergenceSentinel(strategy)
    net: Any = build(strategy, Net)
    if rank_of(strategy) % 2:
        poke(net.layer1.bias)
    if ranks(strategy) in (2, 4):
        with pytest.raises(DivergenceError, match="Which copy is wrong cannot be known") as caught:
            sentinel.check()
        assert caught.value.ranks == ()


def test_two_elements_that_changed_places(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step()
    if rank_of(strategy) == last(strategy):
        flat = training.net.wide.weight.data.view(-1)
        flat[[3, 9000]] = flat[[9000, 3]]
    assert_told(strategy, training.step, "Net.wide.weight", "2 of 10000 elements, most at [")


def test_what_torch_does_not_hear_of(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step()
    if rank_of(strategy) == last(strategy):
        poke(training.net.wide.weight, 777)
    assert_told(strategy, training.step, "Net.wide.weight", "1 of 10000 elements, most at [388, 1]")


def test_optimizer_state(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step(2)
    if rank_of(strategy) == last(strategy):
        poke(training.optimizer.state[training.net.layer2.weight]["exp_avg_sq"], 11)
    assert_told(
        strategy,
        training.step,
        "Adam: exp_avg_sq of Net.layer2.weight",
        "1 of 12 elements, most at [1, 5]",
    )


def test_hyperparameters(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step(2)
    if rank_of(strategy) == last(strategy):
        training.optimizer.param_groups[0]["lr"] = 0.25
    assert_told(
        strategy, training.step, "Adam: lr of group 0", f"rank {last(strategy)}: 0.25\n", "0.001\n"
    )


def test_the_second_optimizer_of_a_class(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    first, second = Training(strategy), Training(strategy)
    first.step(2)
    second.step(2)
    if rank_of(strategy) == last(strategy):
        second.optimizer.param_groups[0]["eps"] = 1.0
    assert_told(strategy, first.step, "Adam number 2: eps of group 0")


def test_an_optimizer_that_one_rank_has_dropped(strategy: ms.Strategy) -> None:
    """When its memory is freed may differ between ranks, and is no divergence; the digests then differ."""
    sentinel = DivergenceSentinel(strategy, every=1)
    dropped, kept = Training(strategy), Training(strategy)
    dropped.step(2)
    kept.step()
    if rank_of(strategy) == last(strategy):
        del dropped
    kept.step(2)
    if rank_of(strategy) == 0:
        poke(kept.net.layer1.bias)
    assert errors_of_ranks(sentinel.check)[0][0] == (
        "DivergenceError" if ranks(strategy) > 1 else ""
    )


def test_a_buffer_that_the_forward_reads(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step()
    if rank_of(strategy) == last(strategy):
        poke(training.net.table, 7)
    assert_told(
        strategy, training.step, "Net.table", "of 8 elements, most at [7]", k_may_differ=True
    )


def test_statistics_of_batch_norm(strategy: ms.Strategy) -> None:
    """Each replica's own until gradients are reduced, and equal afterwards."""
    sentinel = DivergenceSentinel(strategy, every=1)
    training = Training(strategy)
    training.step()
    x, _ = next(training.batches)
    strategy.run(lambda: (training.net(x * (1 + replica_id())), None)[1])
    sentinel.check()
    training.step()
    sentinel.check()
    if rank_of(strategy) == last(strategy):
        poke(training.net.norm.running_var, 2)
    assert_told(strategy, sentinel.check, "Net.norm.running_var", "most at [2]", k_may_differ=True)


def test_variables(strategy: ms.Strategy) -> None:
    sentinel = DivergenceSentinel(strategy)
    with strategy.scope():
        same: Any = ms.Variable(torch.ones(3), name="same")
        array: Any = ms.Variable(np.ones((2, 3)), name="array")
        on_read: Any = ms.Variable(
            np.ones(2),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
    strategy.run(lambda: on_read.assign_add([rank_of(strategy), 1])[:0])
    same.assign_add(torch.ones(3))
    sentinel.check()
    if rank_of(strategy) == last(strategy):
        array.values[0].read_value()[1, 2] = 7
    assert_told(
        strategy,
        sentinel.check,
        "variable 'array'",
        "1 of 6 elements, most at [1, 2]",
        k_may_differ=True,
    )


def test_a_replica_of_one_rank(strategy: ms.Strategy) -> None:
    """Two against two of all ranks' copies, or three against one: the same pokes on every rank are found, too."""
    sentinel = DivergenceSentinel(strategy)
    with strategy.scope():
        array: Any = ms.Variable(np.ones(3), name="array")
    array.values[-1].read_value()[1] = 7
    if strategy.extended.num_local_replicas == 1:
        sentinel.check()
    else:
        with pytest.raises(
            DivergenceError, match=r"replica 1 \(rank 0\): 1 of 3 elements, most at \[1\]"
        ):
            sentinel.check()


def test_every_counts_backwards(strategy: ms.Strategy) -> None:
    """With `every=3`, what is wrong from the first call on is told in the third, and what was repaired is not."""
    DivergenceSentinel(strategy, every=3)
    training = Training(strategy)
    start = training.net.layer1.bias.detach().clone()
    if rank_of(strategy) == last(strategy):
        poke(training.net.table)
    training.step(2)
    errors = errors_of_ranks(training.step)
    several = strategy.num_replicas_in_sync > 1 and ranks(strategy) > 1
    assert {kind for kind, _, _ in errors} == {"DivergenceError" if several else ""}
    if several:
        assert all("in call 3 of backward(); this is the first comparison" in e[1] for e in errors)
    strategy.mirror(training.net)
    training.step(3)
    assert not torch.equal(start, training.net.layer1.bias)


def test_gradients_are_left_as_they_were(strategy: ms.Strategy) -> None:
    DivergenceSentinel(strategy, every=1)
    net: Any = build(strategy, net_without_norm)
    x, y = next(batches())
    if rank_of(strategy) == last(strategy):
        poke(net.layer1.bias)
    step = lambda: strategy.run(lambda: loss_of(net(own(x)), own(y)).backward())  # noqa: E731
    assert_told(strategy, step, "Net.layer1.bias")
    if ranks(strategy) > 1:
        assert all(parameter.grad is None for parameter in net.parameters())


def test_nans(strategy: ms.Strategy) -> None:
    sentinel = DivergenceSentinel(strategy)
    net: Any = build(strategy, Net)
    net.layer1.bias.data.fill_(float("nan"))
    sentinel.check()
    if rank_of(strategy) == last(strategy):
        net.layer1.bias.data[2] = 0
    assert_told(
        strategy, sentinel.check, "Net.layer1.bias", "1 of 6 elements, most at [2]: ", "nan"
    )


def test_ranks_that_do_not_give_the_same_number(strategy: ms.Strategy) -> None:
    every: Any
    for every in (5 + rank_of(strategy), 0, "3", True, 2.0):
        differ = ranks(strategy) > 1 or every != 5
        errors = errors_of_ranks(lambda every=every: DivergenceSentinel(strategy, every))
        assert {kind for kind, _, _ in errors} == {"ValueError" if differ else ""}, every
    assert_usable(strategy)


def test_a_sentinel_on_one_rank_only(strategy: ms.Strategy) -> None:
    training = Training(strategy)
    training.step()

    def make_or_step() -> None:
        if rank_of(strategy) == 0:
            DivergenceSentinel(strategy)
        else:
            training.step()

    errors = errors_of_ranks(make_or_step)
    assert {kind for kind, _, _ in errors} == {
        "CollectiveMismatchError" if ranks(strategy) > 1 else ""
    }


def test_a_rank_that_cannot_read_its_state(
    strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All raise; and comparisons go on in step afterwards, though this rank has not come so far."""
    from mpistrat.pytorch.watch import divergence_report

    DivergenceSentinel(strategy, every=2)
    training = Training(strategy)
    training.step()

    def broken(value: Any) -> bytes:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        if rank_of(strategy) == last(strategy) and strategy.num_replicas_in_sync > 1:
            patch.setattr(divergence_report, "digest", broken)
        errors = errors_of_ranks(training.step)
    if strategy.num_replicas_in_sync == 1:
        return
    assert errors[last(strategy)][0] in ("MemoryError", "CollectiveMismatchError"), errors
    assert {kind for kind, _, _ in errors[:-1]} <= {"CollectiveMismatchError"}, errors
    training.step(4)
    assert_usable(strategy)
