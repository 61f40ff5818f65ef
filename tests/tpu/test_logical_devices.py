"""A replica on four logical devices, which are torch_xla's virtual CPU devices: `programs/sharded_step.py`."""

from pathlib import Path
from typing import Any

import pytest

from mpistrat.xla.logical_devices import LogicalDevices
from support.xla.child_programs import answer

PROGRAM = (Path(__file__).parent / "programs" / "sharded_step.py").read_text()

# What is said of parameters, before training; what of the input, the first weight and the hidden layer, in each step.
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"input": [2, 2]}),
    ({}, {"input": [4, 1], "weight": [1, 4]}),
    ({"first.weight": [2, 2]}, {"input": [4, 1], "hidden": [2, 2]}),
    ({"first.weight": [4, 1], "first.bias": [4], "second.weight": [1, 4]}, {"hidden": [1, 4]}),
    ({"second.weight": [2, 2]}, {"weight": [4, 1], "hidden": "whole"}),
]
SHAPES = {"first.weight": [16, 8], "first.bias": [16], "second.weight": [4, 16], "second.bias": [4]}


def ran(body: str, devices: int = 4) -> Any:
    return answer(PROGRAM + body, CPU_NUM_DEVICES=str(devices), TF_CPP_MIN_LOG_LEVEL="2")


def trained(arguments: str) -> list[dict[str, Any]]:
    return ran(f"answer([trained(spread, split, {arguments}) for spread, split in {LAYOUTS!r}])")


def shard_shapes(spread: dict[str, list[int]]) -> dict[str, list[list[int]]]:
    shapes = {}
    for name, shape in SHAPES.items():
        parts = spread.get(name, [1] * len(shape))
        shapes[name] = [[n // count for n, count in zip(shape, parts, strict=True)]] * 4
    return shapes


def test_three_steps_spread_are_those_of_the_host_by_one_compilation() -> None:
    for (spread, _), result in zip(LAYOUTS, trained("torch.float32"), strict=True):
        assert result["difference"] < 1e-6
        assert result["compilations"] == [1, 0, 0]
        assert result["shards"] == shard_shapes(spread)


def test_three_steps_in_bf16() -> None:
    for (spread, _), result in zip(LAYOUTS, trained("torch.bfloat16"), strict=True):
        assert result["difference"] < 0.02  # values are of 1, of which bf16 keeps 8 bits
        assert result["compilations"] == [1, 0, 0]
        assert result["shards"] == shard_shapes(spread)


def test_the_state_of_an_optimizer_takes_no_more_compilations_than_whole() -> None:
    spread, split = LAYOUTS[2]
    whole, cut = ran(
        f"answer([trained({{}}, {{}}, momentum=0.9), trained({spread!r}, {split!r}, momentum=0.9)])"
    )
    assert cut["difference"] < 1e-6
    assert cut["compilations"] == whole["compilations"]
    assert cut["shards"] == shard_shapes(spread)


def test_inside_a_step_the_value_and_its_gradient_are_laid_out_and_the_tensor_is_not() -> None:
    body = """
device_input, = RUNTIME.put([torch.arange(32.0).reshape(8, 4)], DEVICE)
device_input.requires_grad_()
before = [layout_of(device_input)]
with RUNTIME.graphs.step("step"):
    hidden = LOGICAL.split(device_input * 2, [1, 4])
    whole = LOGICAL.replicate(LOGICAL.split(device_input, [2, 2]))
    (hidden.sin().sum() + (whole * whole).sum()).backward()
    graph = graph_of([hidden, whole, device_input.grad])
value, again, gradient = RUNTIME.fetch([hidden.detach(), whole.detach(), device_input.grad])
host_input = torch.arange(32.0).reshape(8, 4)
answer({
    "graph": graph,
    "input": before + [layout_of(device_input)],
    "hidden": [layout_of(hidden), shards_of(hidden)],
    "equal": [torch.equal(value, host_input * 2), torch.equal(again, host_input)],
    "gradient": (gradient - 2 * (host_input * 2).cos() - 2 * host_input).abs().max().item(),
})
"""
    columns, square = "devices=[1,4]0,1,2,3", "devices=[2,2]0,1,2,3"
    result = ran(body)
    assert sorted(result["graph"]) == sorted(2 * [columns] + 2 * [square] + 2 * ["replicated"])
    assert result["input"] == ["", ""]
    assert result["hidden"] == ["{" + columns + "}", [[8, 1]] * 4]
    assert result["equal"] == [True, True]
    assert result["gradient"] < 1e-4


def test_outside_a_step_a_leaf_is_itself_laid_out_and_may_be_anew() -> None:
    body = """
host = torch.arange(64.0).reshape(8, 8)
put, = RUNTIME.put([host], DEVICE)
tensors = {
    "recorded": host.to(DEVICE) + 0,
    "put": put,
    "parameter": nn.Parameter(host.clone()).to(DEVICE).detach().requires_grad_(),
    "uploaded": host.to(DEVICE),
    "half": host.bfloat16().to(DEVICE),
}
results = {}
LOGICAL.split(tensors["recorded"], [1, 4])
for name, tensor in tensors.items():
    results[name] = []
    for parts in ([2, 2], [2, 2], [4, 1], "whole", [1, 4]):
        assert said_of(tensor, parts) is tensor
        shards = shards_of(tensor)
        with RUNTIME.graphs.step("step"), torch.no_grad():
            tensor += 1
        host_value, = RUNTIME.fetch([tensor.detach()])
        expected = host.to(host_value.dtype) + len(results[name]) + 1
        results[name].append([shards, shards_of(tensor), torch.equal(host_value, expected)])
long = torch.ones(1000, 1000, device=DEVICE)
with RUNTIME.graphs.step("step"), torch.no_grad():
    for _ in range(20):
        long = long @ long / 1000
    for tensor in tensors.values():
        tensor += tensor * long[0, 0].to(tensor.dtype)
for name, tensor in tensors.items():  # while they are computed
    LOGICAL.split(tensor, [2, 2])
for name, tensor in tensors.items():
    host_value, = RUNTIME.fetch([tensor.detach()])
    shards = shards_of(tensor)
    results[name].append([shards, shards, torch.equal(host_value, 2 * (host.to(host_value.dtype) + 5))])
computed = tensors["parameter"] * 2
cut = LOGICAL.split(computed, [4, 1])
part = put[:4]
cut_part = LOGICAL.split(part, [1, 4])
same = [cut is computed, cut_part is part]
answer([results, same, cut.requires_grad, layout_of(cut), layout_of(cut_part)])
"""
    results, same, requires_grad, *layouts = ran(body)
    shapes = [[4, 4], [4, 4], [2, 8], [8, 8], [8, 2], [4, 4]]
    for name, result in results.items():
        assert result == [[[shape] * 4, [shape] * 4, True] for shape in shapes], name
    assert (same, requires_grad) == ([False, False], True)
    assert layouts == ["{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"]


def test_what_cannot_be_laid_out_is_an_error_that_says_the_number() -> None:
    body = """
tensor = torch.ones(8, 6, device=DEVICE)
def message(call, *arguments):
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
answer([
    message(LOGICAL.split, tensor, [1, 4]),
    message(LOGICAL.split, tensor, [2, 1]),
    message(LOGICAL.split, tensor, [4]),
    message(LOGICAL.split, torch.ones(()).to(DEVICE), []),
    message(LOGICAL.assign, tensor, 4),
    message(LOGICAL.assign, tensor, -1),
    message(LOGICAL.split, torch.ones(8, 4), [2, 2]),
    message(LOGICAL.replicate, torch.ones(2).numpy()),
    message(LogicalDevices, RUNTIME, 2),
])
"""
    parts = [
        "dimension 1 of the value's shape [8, 6] does not divide into 4 parts",
        "[2, 1] makes 2 parts for the 4 logical devices",
        "partition_dimensions [4] has 1 entries",
        "[] makes 1 parts for the 4 logical devices",
        "no logical device 4: a replica has 4",
        "no logical device -1",
        "this is on cpu: move it there first",
        "this is on ndarray",
        "2 logical devices",
    ]
    for message, part in zip(ran(body), parts, strict=True):
        assert part in message


def test_torch_xla_takes_one_device_for_all() -> None:
    """Why all devices have what `assign` gives to one: as soon as this fails, it can be built."""
    body = """
from torch_xla.distributed.spmd import ShardingType
native = torch_xla._XLAC
layouts = []
for kind, devices in ((ShardingType.MAXIMAL, [2]), (ShardingType.TILED, [[2]])):
    tensor = torch.ones(4, 4, device=DEVICE) * 2
    native._xla_annotate_custom_sharding(tensor, native.OpSharding(devices, [], [], kind))
    layouts += graph_of([tensor])
answer(layouts)
"""
    assert ran(body) == ["replicated", "replicated"]


def test_what_is_assigned_to_one_device_is_on_all_and_that_is_told_once() -> None:
    body = """
import contextlib, io
told = io.StringIO()
with contextlib.redirect_stderr(told):
    doubled = LOGICAL.assign(torch.arange(4.0).to(DEVICE) * 2, 3)
    LOGICAL.assign(doubled, 0)
lines = [line for line in told.getvalue().splitlines() if line.startswith("mpistrat")]
answer([layout_of(doubled), doubled.cpu().tolist(), lines])
"""
    layout, values, lines = ran(body)
    assert layout == "{replicated}"
    assert values == [0.0, 2.0, 4.0, 6.0]
    (line,) = lines
    assert "keeps no value on one of a replica's 4 logical devices" in line


class NoRuntime:
    """Fails whoever asks it for anything."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


@pytest.mark.parametrize("shape", [(4, 2), ()])
def test_one_logical_device_checks_arguments_and_uses_no_runtime(shape: tuple[int, ...]) -> None:
    import torch

    devices = LogicalDevices(NoRuntime(), 1)  # type: ignore[arg-type]
    tensor = torch.zeros(shape)
    assert devices.assign(tensor, 0) is tensor
    assert devices.split(tensor, [1] * len(shape)) is tensor
    assert devices.replicate(tensor) is tensor
    with pytest.raises(ValueError, match="no logical device 1"):
        devices.assign(tensor, 1)
    with pytest.raises(ValueError, match="partition_dimensions"):
        devices.split(tensor, [2] * (len(shape) or 1))
