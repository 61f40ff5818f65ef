"""What `scope()` and `mirror` make equal on all ranks."""

import copy
import io

import pytest
import torch

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from support.training.whole_batch import (
    FEATURES,
    Pair,
    assert_same_parameters,
    batches,
    build,
    equal_on_all_ranks,
    loss_of,
    own,
    plain_step,
    small_net,
)


def check_equal(strategy: ms.Strategy, model: torch.nn.Module) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert equal_on_all_ranks(strategy, tensor), name


def check_trains(strategy: ms.Strategy, model: torch.nn.Module) -> None:
    """One step on the replicas is one step alone on the whole batch."""
    strategy.run(lambda: None)  # mirrors what is pending
    alone = copy.deepcopy(model)
    x, y = next(batches())
    optimizer, optimizer_alone = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    strategy.run(lambda: plain_step(model, optimizer, own(x), own(y)))
    plain_step(alone, optimizer_alone, x, y)
    assert_same_parameters(model, alone)
    check_equal(strategy, model)


def rank(strategy: ms.Strategy) -> int:
    return strategy.extended.communicator.rank


def test_seeds_that_differ_give_rank_0s_parameters(strategy: ms.Strategy) -> None:
    torch.manual_seed(100)
    expected = small_net().double()
    model = build(strategy)
    assert_same_parameters(model, expected)
    check_trains(strategy, model)


def test_buffers_are_rank_0s(strategy: ms.Strategy) -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("table", torch.full((3,), float(rank(strategy))))
        module.register_buffer("absent", None)
        module.register_buffer("mask", torch.tensor([rank(strategy) == 0]))
        module.register_buffer("temporary", torch.randn(()), persistent=False)
        return module

    model = build(strategy, make)
    assert model.table.tolist() == [0, 0, 0]
    assert model.mask.tolist() == [True]
    check_equal(strategy, model)


def test_order_of_constructors_does_not_matter_for_values(strategy: ms.Strategy) -> None:
    """Ranks draw different numbers, and parts are put together later."""
    torch.manual_seed(rank(strategy))
    with strategy.scope():
        torch.randn(rank(strategy))
        last = torch.nn.Linear(3, 2)
        first = torch.nn.Linear(FEATURES, 3)
        model = torch.nn.Sequential()
        model.append(first)
        model.add_module("last", last)
        model.double()
    check_trains(strategy, model)


def test_several_models_and_nested_scopes(strategy: ms.Strategy) -> None:
    torch.manual_seed(rank(strategy))
    with strategy.scope():
        model = small_net().double()
        with strategy.scope():
            other = torch.nn.Linear(2, 2).double()
    check_equal(strategy, model)
    check_equal(strategy, other)
    check_trains(strategy, torch.nn.Sequential(model, other))


def test_transformer_encoder_deepcopies_its_layers(strategy: ms.Strategy) -> None:
    def make() -> torch.nn.Module:
        layer = torch.nn.TransformerEncoderLayer(
            FEATURES, 2, dim_feedforward=4, dropout=0.0, batch_first=True
        )
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return torch.nn.Sequential(
            torch.nn.Unflatten(1, (1, FEATURES)),
            encoder,
            torch.nn.Flatten(),
            torch.nn.Linear(FEATURES, 2),
        )

    check_trains(strategy, build(strategy, make))


def test_skip_init(strategy: ms.Strategy) -> None:
    def make() -> torch.nn.Module:
        linear = torch.nn.utils.skip_init(torch.nn.Linear, FEATURES, 2)
        torch.nn.init.normal_(linear.weight)
        torch.nn.init.normal_(linear.bias)
        return linear

    check_trains(strategy, build(strategy, make))


@pytest.mark.parametrize("materialized", ["in scope", "after scope"])
def test_meta_then_to_empty(strategy: ms.Strategy, materialized: str) -> None:
    def fill(model: torch.nn.Module) -> None:
        model.to_empty(device="cpu")
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                torch.nn.init.normal_(tensor)

    torch.manual_seed(rank(strategy))
    with strategy.scope():
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 2, dtype=torch.float64))
        if materialized == "in scope":
            fill(model)
    if materialized == "after scope":
        fill(model)
    check_trains(strategy, model)


@pytest.mark.parametrize("first_forward", ["in scope", "in run"])
def test_lazy_modules(strategy: ms.Strategy, first_forward: str) -> None:
    torch.manual_seed(rank(strategy))
    x = torch.randn(5, FEATURES, dtype=torch.float64)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.LazyLinear(3, dtype=torch.float64),
            torch.nn.LazyBatchNorm1d(affine=False, dtype=torch.float64),
            torch.nn.LazyLinear(2, dtype=torch.float64),
        ).eval()
        if first_forward == "in scope":
            model(x)
    strategy.run(lambda: None)  # nothing to mirror, or nothing is known yet
    if first_forward == "in run":
        strategy.run(lambda: model(x))
    check_trains(strategy, model)


def test_replaced_parameters_and_modules(strategy: ms.Strategy) -> None:
    model = build(strategy)
    torch.manual_seed(rank(strategy))
    model[0].weight = torch.nn.Parameter(torch.randn(5, FEATURES, dtype=torch.float64))
    model[2] = torch.nn.Linear(5, 2).double()
    check_trains(strategy, model)


def test_load_state_dict_assign(strategy: ms.Strategy) -> None:
    model = build(strategy)
    torch.manual_seed(rank(strategy))
    model.load_state_dict(small_net().double().state_dict(), assign=True)
    check_trains(strategy, model)


def test_load_state_dict_keeps_the_mirrored_tensors(strategy: ms.Strategy) -> None:
    model = build(strategy)
    torch.manual_seed(7)
    loaded = small_net().double()
    model.load_state_dict(loaded.state_dict())
    assert_same_parameters(model, loaded)
    check_trains(strategy, model)


def test_mirror_of_a_deepcopy(strategy: ms.Strategy) -> None:
    model = build(strategy)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied[0].weight.add_(rank(strategy))
    assert strategy.mirror(copied) is copied
    torch.testing.assert_close(copied[0].weight, model[0].weight)
    check_trains(strategy, copied)


def test_mirror_of_an_unpickled_module(strategy: ms.Strategy) -> None:
    stored = io.BytesIO()
    torch.manual_seed(rank(strategy))
    torch.save(small_net().double(), stored)
    stored.seek(0)
    model = torch.load(stored, weights_only=False)
    strategy.mirror(model)
    check_trains(strategy, model)


def test_mirror_of_hand_made_parameters(strategy: ms.Strategy) -> None:
    torch.manual_seed(rank(strategy))
    weight = torch.nn.Parameter(torch.randn(FEATURES, 2, dtype=torch.float64))
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    strategy.mirror([weight, bias])
    assert equal_on_all_ranks(strategy, weight)
    assert equal_on_all_ranks(strategy, bias)
    x, y = next(batches())
    strategy.run(lambda: loss_of(own(x) @ weight + bias, own(y)).backward())
    alone = [weight.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()]
    loss_of(x @ alone[0] + alone[1], y).backward()
    torch.testing.assert_close([weight.grad, bias.grad], [p.grad for p in alone])


def test_mirror_twice_sends_rank_0s_values_again(strategy: ms.Strategy) -> None:
    model = build(strategy)
    with torch.no_grad():
        model[0].bias.fill_(rank(strategy))
    strategy.mirror(model)
    assert model[0].bias.tolist() == [0] * 5
    check_trains(strategy, model)


def test_mirror_refuses_what_cannot_be_mirrored(strategy: ms.Strategy) -> None:
    with pytest.raises(TypeError, match="got 5"):
        strategy.mirror(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="result of an operation"):
        strategy.mirror(torch.ones(2, requires_grad=True) * 2)  # type: ignore[arg-type]
    model = build(strategy)
    with pytest.raises(RuntimeError, match="mirror was called inside run"):
        strategy.run(lambda: strategy.mirror(model))


def test_dtypes_and_layouts_of_what_is_sent(strategy: ms.Strategy) -> None:
    torch.manual_seed(rank(strategy))
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.float64)
    with strategy.scope():
        model = torch.nn.ParameterList(torch.randn(2, 3).to(dtype) for dtype in dtypes)
        model.append(torch.nn.Parameter(torch.randn(())))
        model.append(torch.nn.Parameter(torch.randn(0, 3)))
        model.append(torch.nn.Parameter(torch.randn(4, 3).t()))
        model.register_buffer("flags", torch.rand(5) > 0.5)
        model.register_buffer("counts", torch.randint(100, (3, 2)))
    check_equal(strategy, model)


def test_stepping_a_parameter_that_is_not_mirrored_names_it(strategy: ms.Strategy) -> None:
    model = small_net().double()
    x, y = next(batches())
    if strategy.num_replicas_in_sync == 1:
        strategy.run(lambda: plain_step(model, torch.optim.SGD(model.parameters()), own(x), own(y)))
        return
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 0, of shape \[5, 4\], was never"):
        strategy.run(lambda: plain_step(model, torch.optim.SGD(model.parameters()), own(x), own(y)))
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight, .*call strategy\.mirror"):
        strategy.run(
            lambda: plain_step(model, torch.optim.SGD(model.named_parameters()), own(x), own(y))
        )


def test_a_parameter_swapped_in_the_optimizer_is_noticed(strategy: ms.Strategy) -> None:
    pair = Pair(strategy)
    pair.train(plain_step, steps=1)
    pair.optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.zeros(5))
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(RuntimeError, match=r"parameter 1 of group 0, of shape \[5\]"):
            strategy.run(pair.optimizer.step)


def test_tensors_whose_elements_share_memory(strategy: ms.Strategy) -> None:
    """No rank copies anything into them. A dimension of one element shares none."""

    def make(*shape: int) -> torch.nn.Module:
        module = torch.nn.Linear(4, 2)
        module.register_buffer("mask", torch.ones(1, 1).expand(*shape))
        return module

    def make_in_scope() -> torch.nn.Module:
        with strategy.scope():
            return make(1, 3)

    check_equal(strategy, strategy.mirror(make(1, 1)))
    if strategy.world_size == 1:
        assert make_in_scope().mask.tolist() == [[1, 1, 1]]
        return
    for mirror in (make_in_scope, lambda: strategy.prepare(make(3, 1))):
        with pytest.raises(ValueError, match=r"'Linear\.mask' share memory, .*: tensor\.clone\(\)"):
            mirror()
    whole = make(1, 1)
    whole.mask = torch.ones(1, 3)
    with pytest.raises(CollectiveMismatchError, match=r"float32\[1, 3\], expanded on rank 1"):
        strategy.mirror(make(1, 3) if rank(strategy) == 1 else whole)


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_between_ranks(strategy: ms.Strategy) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"Linear\.weight: .*\[2, 4\] on rank 0"):
        build(strategy, lambda: torch.nn.Linear(4, 2 + min(1, rank(strategy))))
    with pytest.raises(CollectiveMismatchError, match="ranks' models differ"):
        build(strategy, lambda: torch.nn.Linear(4, 2, bias=rank(strategy) == 0))
    with pytest.raises(CollectiveMismatchError, match="ranks' models differ"):
        build(strategy, lambda: torch.nn.Linear(4 + rank(strategy), 2))
    check_trains(strategy, build(strategy))


@pytest.mark.mpi(min_size=2)
def test_a_model_that_some_ranks_do_not_build(strategy: ms.Strategy) -> None:
    with pytest.raises(CollectiveMismatchError, match="mirrored parameters"):  # noqa: PT012
        with strategy.scope():
            model = torch.nn.Linear(4, 2) if rank(strategy) == 0 else None
        strategy.run(lambda: None)
        strategy.reduce("sum", torch.ones(2), axis=None)
    del model


def test_modules_made_in_run_are_not_mirrored(strategy: ms.Strategy) -> None:
    """Each replica's own: a compiler's, or one for a single use, need not be the same everywhere."""
    kept = []
    strategy.run(lambda: kept.append(torch.nn.Linear(1 + rank(strategy), 2)))
    strategy.run(lambda: None)
    check_trains(strategy, build(strategy))


def test_dropped_models_are_forgotten(strategy: ms.Strategy) -> None:
    registry = strategy.extended.modules.get().registry
    for _ in range(3):
        pair = Pair(strategy)
        pair.train(plain_step, steps=2)
    kept = Pair(strategy)
    del pair
    other = Pair(strategy, lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(FEATURES)))
    del other
    Pair(strategy)
    assert len(registry.slots) <= 4 + 4 + 2
    assert len(registry.buffers) <= 3
    kept.train(plain_step)


def test_a_failed_scope_sends_nothing(strategy: ms.Strategy) -> None:
    def fail() -> torch.nn.Module:
        torch.nn.Linear(2, 2)
        raise KeyError

    if rank(strategy) == 0:
        with pytest.raises(KeyError):
            build(strategy, fail)
    check_trains(strategy, build(strategy))


@pytest.mark.mpi(min_size=2)
def test_registrations_on_one_rank_only_do_no_harm(strategy: ms.Strategy) -> None:
    model = build(strategy)
    if rank(strategy) == 1:
        model.logger = torch.nn.Identity()
    check_trains(strategy, build(strategy))


def test_state_dict_is_plain(strategy: ms.Strategy) -> None:
    def make() -> torch.nn.Module:
        return torch.nn.Sequential(small_net(), torch.nn.BatchNorm1d(2))

    pair = Pair(strategy, make)
    x, y = (torch.cat([t, t]) for t in next(pair.batches))
    strategy.run(lambda: plain_step(pair.model, pair.optimizer, own(x), own(y)))
    state = pair.model.state_dict()
    assert list(state) == list(pair.alone.state_dict())
    assert all(type(value) is torch.Tensor for value in state.values())
    pair.alone.load_state_dict(state)
    stored = io.BytesIO()
    torch.save([pair.model, state], stored)
    stored.seek(0)
    module, loaded = torch.load(stored, weights_only=False)
    for copied in (loaded, module.state_dict(), copy.deepcopy(pair.model).state_dict()):
        torch.testing.assert_close(dict(copied), dict(state))
    strategy.mirror(module)
    check_trains(strategy, module[0])
