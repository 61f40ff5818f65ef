"""A TPUStrategy with a device assignment: which replicas ranks get, and the logical devices of one."""

from typing import Any

from support.xla.child_programs import answer

START = """
import contextlib, io, json
import torch
import torch_xla
import mpistrat as ms
from mpistrat import xla

topology = ms.tpu.initialize_tpu_system()

def strategy_of(shape, replicas):
    assignment = ms.tpu.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=replicas)
    return ms.TPUStrategy(experimental_device_assignment=assignment, gradients="sum")

def refusal(call, *arguments, **named):
    try:
        call(*arguments, **named)
    except Exception as error:
        return [type(error).__name__, str(error)]

told = io.StringIO()
"""


def child(program: str, cores: int) -> Any:
    return answer(START + program, CPU_NUM_DEVICES=str(cores), TF_CPP_MIN_LOG_LEVEL="2")


def test_one_replica_on_four_logical_devices_trains_as_on_the_host() -> None:
    devices, differences, layouts, same, lines, wrong = child(
        """
strategy = strategy_of([1, 4, 1, 1], 1)
torch.manual_seed(3)
host = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
inputs = torch.randn(8, 8)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    model.load_state_dict(host.state_dict())
weight = model[0].weight
same = [strategy.experimental_split_to_logical_devices(weight, [4, 1]) is weight, weight is model[0].weight]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, host)]
layouts = []

def step(x):
    x = strategy.experimental_split_to_logical_devices(x, [2, 2])
    hidden = strategy.experimental_replicate_to_logical_devices(model[:2](x))
    optimizers[0].zero_grad()
    loss = (strategy.experimental_assign_to_logical_device(model[2](hidden), 3) ** 2).sum()
    layouts[:] = [torch_xla._XLAC._get_xla_sharding_spec(t) for t in (x, hidden)]
    loss.backward()
    optimizers[0].step()
    return loss

differences = []
with contextlib.redirect_stderr(told):
    for batch in strategy.experimental_distribute_dataset([inputs, inputs]):
        loss = strategy.run(step, args=(batch,))
        optimizers[1].zero_grad()
        on_host = (host(inputs) ** 2).sum()
        on_host.backward()
        optimizers[1].step()
        differences.append(abs(float(loss) - float(on_host)) / float(on_host))
for one, other in zip(model.parameters(), host.parameters()):
    differences.append((one.detach().cpu() - other.detach()).abs().max().item())
layouts.append(torch_xla._XLAC._get_xla_sharding_spec(weight))
wrong = [
    refusal(strategy.experimental_split_to_logical_devices, weight, [3, 1]),
    refusal(strategy.experimental_split_to_logical_devices, weight, [1, 2]),
    refusal(strategy.experimental_assign_to_logical_device, weight, 4),
    refusal(strategy.experimental_replicate_to_logical_devices, torch.ones(2)),
]
lines = [line for line in told.getvalue().splitlines() if "keeps no value" in line]
print(json.dumps([
    [strategy.num_replicas_in_sync, *strategy.extended.worker_devices], differences, layouts, same, len(lines), wrong]))
""",
        4,
    )
    assert devices == [1, "xla:0"]
    assert all(difference < 1e-5 for difference in differences), differences
    assert layouts == [
        "{devices=[2,2]0,1,2,3}",
        "{replicated}",
        "{devices=[4,1]0,1,2,3}",
    ]
    assert same == [True, True]
    assert lines == 1
    assert [kind for kind, _ in wrong] == ["ValueError"] * 4
    parts = ["does not divide into 3", "makes 2 parts for the 4", "no logical device 4", "on cpu"]
    for (_, text), part in zip(wrong, parts, strict=True):
        assert part in text


def test_replicas_of_one_core_and_assignments_that_cannot_run() -> None:
    all_cores, first, wrong, types = child(
        """
every = strategy_of([1, 1, 1, 1], 4)
x = every.experimental_distribute_values_from_function(lambda c: torch.tensor(float(c.replica_id_in_sync_group)))
doubled = every.run(lambda x: every.experimental_split_to_logical_devices(x * 2, []), args=(x,))
total = every.reduce("sum", doubled, axis=None)
wrong = [
    refusal(strategy_of, [1, 1, 1, 1], 5),
    refusal(strategy_of, [1, 2, 1, 1], 2),
    refusal(strategy_of, [1, 2, 1, 1], 1),
    refusal(strategy_of, [1, 1, 1, 1], 2),
    refusal(ms.TPUStrategy, experimental_device_assignment=ms.tpu.DeviceAssignment.build(
        ms.tpu.Topology(mesh_shape=[2, 2, 1, 1], device_coordinates=[[[0, i, 0, 0] for i in range(2)],
            [[1, i, 0, 0] for i in range(2)]]), num_replicas=1)),
    refusal(every.experimental_assign_to_logical_device, total, 1),
    refusal(every.experimental_split_to_logical_devices, torch.ones(4), [2]),
]
one = strategy_of([1, 1, 1, 1], 1)
types = [
    refusal(ms.TPUStrategy, "local"),
    refusal(ms.TPUStrategy, experimental_device_assignment=topology),
    refusal(ms.TPUStrategy, communication_options="ring"),
    refusal(ms.TPUStrategy, gradients="max"),
    refusal(ms.TPUStrategy, check="often"),
]
print(json.dumps([[every.num_replicas_in_sync, float(total)], one.num_replicas_in_sync, wrong, types]))
""",
        4,
    )
    assert all_cores == [4, 12.0]
    assert first == 1
    parts = [
        "the mesh [1, 4, 1, 1] has room for 4",
        "start 2 ranks per host",
        "CPU_NUM_DEVICES=2",
        "CPU_NUM_DEVICES=2",
        "the device assignment was built for",
        "no logical device 1",
        "2 parts for the 1 logical devices",
    ]
    for (kind, text), part in zip(wrong, parts, strict=True):
        assert kind == "ValueError", text
        assert part in text
    names = ["TPUClusterResolver", "DeviceAssignment", "CommunicationOptions", "gradients", "check"]
    for (kind, text), name in zip(types, names, strict=True):
        assert kind == "ValueError", text
        assert name in text
