"""What `run` takes, gives, refuses and reports on several virtual cores of one rank, and on one.

Each test is a child: how many devices a process has is known once it has started.
"""

import math
from typing import Any

import numpy as np
import pytest

from support.xla.child_programs import answer

START = """
import contextlib, io, json, sys
import numpy as np
import torch
import mpistrat as ms

strategy = ms.TPUStrategy(gradients="sum")
replicas = strategy.num_replicas_in_sync
device = strategy.extended.worker_devices[0]

def per_replica(fn):
    return strategy.experimental_distribute_values_from_function(
        lambda context: fn(context.replica_id_in_sync_group))

def lists(value):
    return [v.tolist() if hasattr(v, "tolist") else v for v in strategy.experimental_local_results(value)]

def refusal(fn, *args):
    "The class and the text of the error; then that the strategy goes on."
    try:
        strategy.run(fn, args=args)
    except Exception as error:
        told = [type(error).__name__, str(error)]
        assert lists(strategy.run(lambda x: x + 1, args=(inputs,))) == [[r + 1.0, r + 2.0] for r in range(replicas)]
        return told

inputs = per_replica(lambda r: torch.tensor([r + 0.0, r + 1.0], device=device if replicas == 1 else "cpu"))
"""


def child(program: str, cores: int) -> Any:
    return answer(START + program, CPU_NUM_DEVICES=str(cores))


@pytest.mark.parametrize("cores", [1, 2])
def test_structures_numbers_and_keywords(cores: int) -> None:
    answers = child(
        """
def step(x, number, *, scale):
    return {"twice": x * 2, "nothing": None, "numbers": (3, number * scale), "numpy": np.float32(4)}
weight = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
graph = strategy.run(lambda: {"twice": weight * 2, "itself": weight})
result = strategy.run(step, args=(inputs, per_replica(lambda r: r + 1)), kwargs={"scale": 10})
print(json.dumps([
    lists(result["twice"]), result["nothing"], [lists(n) for n in result["numbers"]], lists(result["numpy"])[0],
    lists(strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)),
    lists(graph["twice"]), strategy.experimental_local_results(graph["twice"])[0].requires_grad,
    replicas > 1 or graph["itself"] is weight]))
""",
        cores,
    )
    each = range(cores)
    assert answers == [
        [[2.0 * r, 2.0 * r + 2] for r in each],
        None,
        [[3] * cores, [10 * (r + 1) for r in each]],
        4.0,
        [*each],
        [[2.0, 4.0]] * cores,
        False,
        True,
    ]


@pytest.mark.parametrize("cores", [1, 2])
def test_a_value_that_is_asked_for_too_early(cores: int) -> None:
    answers = child(
        """
def branch(x):
    return x if (x * 2).sum() > 1 else -x
print(json.dumps([refusal(fn, inputs) for fn in (
    lambda x: (x * 2).sum().item(), branch, lambda x: x[x * 2 > 1], lambda x: str(x * 2),
    lambda x: (x * 2).cpu().numpy())]))
""",
        cores,
    )
    for kind, text in answers:
        assert kind == "RuntimeError"
        assert text.startswith("rank 0: ")
        assert "asks inside run for a value" in text
        assert ", at <string>:" in text
    assert answers[1][1].startswith("rank 0: branch asks")
    assert " in branch: item()" in answers[1][1]
    assert ["aten::nonzero" in text for _, text in answers] == [False, False, True, False, False]


@pytest.mark.parametrize("cores", [1, 2])
def test_arrays_of_the_host_are_named(cores: int) -> None:
    answers = child(
        """
def product(x, y):
    return x @ y
print(json.dumps([
    refusal(product, inputs, torch.ones(2, 3)),
    refusal(product, torch.ones(2), torch.ones(2, 3, device=device)),
    refusal(lambda x: product(x, torch.ones(2, 3)), inputs)]))
""",
        cores,
    )
    expected = ["argument array 1 (float32[2,3])", "argument array 0 (float32[2])", "none of its"]
    for (kind, text), found in zip(answers, expected, strict=True):
        assert kind == "RuntimeError"
        assert ", at <string>:" in text
        assert " in product" in text
        assert found in text
        assert ".to('xla:0')" in text


@pytest.mark.parametrize("cores", [1, 2])
def test_errors_of_a_step_are_its_own(cores: int) -> None:
    answers = child(
        """
def fail(x):
    y = x * 3
    raise KeyError("mine")
try:
    strategy.replica()
except RuntimeError as error:
    no_block = str(error)
print(json.dumps([refusal(fail, inputs), refusal(lambda x: strategy.run(fail, args=(x,)), inputs), no_block]))
""",
        cores,
    )
    assert answers[0] == ["KeyError", "'mine'"]
    assert answers[1][0] == "RuntimeError"
    assert "run was called inside run" in answers[1][1]
    assert "XLA compiles what run records: call strategy.run(step)" in answers[2]


def test_replicas_of_one_program_get_arrays_numbers_or_the_same() -> None:
    answers = child(
        """
same = object()
print(json.dumps([
    refusal(lambda x: x, per_replica(lambda r: f"text {r}")),
    refusal(lambda x: x, per_replica(lambda r: torch.ones(r + 1))),
    strategy.run(lambda x: x is same, args=(per_replica(lambda r: same),)).values]))
""",
        2,
    )
    assert answers[0][0] == answers[1][0] == "ValueError"
    assert "start one rank per core" in answers[0][1]
    assert "drop_last=True" in answers[1][1]
    assert answers[2] == [True, True]


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_replicas_combine_what_they_have(cores: int) -> None:
    answers = child(
        """
def step(x):
    context = ms.get_replica_context()
    weight = torch.ones(2, device=x.device, requires_grad=True)
    reduced = context.all_reduce("sum", weight * x)
    (of_reduced,) = torch.autograd.grad((reduced * x).sum(), weight)
    gathered = context.all_gather(weight * x, 0)
    (of_gathered,) = torch.autograd.grad((gathered * gathered).sum() / 2, weight)
    merged = context.merge_call(lambda s, value: s.reduce("mean", value, axis=None), (x,))
    slices = context.all_reduce("sum", ms.IndexedSlices(x[None], torch.tensor([1], device=x.device), (3, 2)))
    return (context.all_reduce("mean", x), context.all_reduce("sum", {"b": x.bfloat16()})["b"].float(),
        context.all_reduce("mean", 3), gathered.detach(), of_reduced, of_gathered, merged, slices.values,
        context.all_reduce("max", x), context.all_reduce("min", x > 0), context.all_reduce("product", x + 1.0))
print(json.dumps([lists(value) for value in strategy.run(step, args=(inputs,))]))
""",
        cores,
    )
    each = range(cores)
    total = [sum(each) + 0.0, sum(r + 1.0 for r in each)]
    mean = [pytest.approx(t / cores) for t in total]
    rows = [float(v) for r in each for v in (r, r + 1)]
    assert answers == [
        [mean] * cores,
        [total] * cores,
        [3] * cores,
        [rows] * cores,
        [[r * total[0], (r + 1) * total[1]] for r in each],
        [[cores * float(r * r), cores * float((r + 1) ** 2)] for r in each],
        [mean] * cores,
        [[[rows[2 * r], rows[2 * r + 1]] for r in each]] * cores,
        [[cores - 1.0, float(cores)]] * cores,
        [[False, True]] * cores,
        [[math.factorial(cores), math.factorial(cores + 1)]] * cores,
    ]


@pytest.mark.parametrize("cores", [1, 2])
def test_each_core_draws_its_own_numbers_from_the_seed(cores: int) -> None:
    program = """
torch.manual_seed(5)
def step(x):
    return torch.nn.functional.dropout(torch.ones(64, device=x.device)), torch.rand(64, device=x.device)
both = [[lists(value) for value in strategy.run(step, args=(inputs,))] for _ in range(2)]
print(json.dumps(both))
"""
    first, second = child(program, cores), child(program, cores)
    assert first == second
    drawn = [tuple(values) for of_run in first for kind in of_run for values in kind]
    assert len(set(drawn)) == len(drawn) == 4 * cores
    for of_run in first:
        masks, uniform = of_run
        assert all(set(mask) == {0.0, 2.0} for mask in masks)
        assert all(0 <= v < 1 for values in uniform for v in values)


@pytest.mark.parametrize("cores", [1, 2])
def test_a_seed_that_is_given_again_begins_again(cores: int) -> None:
    program = """
def draw():
    return lists(strategy.run(lambda: torch.rand(3, device="xla:0")))
drawn = []
for seed in (5, 5, 7, 5):
    torch.manual_seed(seed)
    drawn.append([draw(), draw()])
print(json.dumps(drawn))
"""
    first, again, other, last = child(program, cores)
    assert first == again == last
    assert first[0] != first[1]
    assert first != other


@pytest.mark.parametrize("cores", [1, 2])
def test_integers_and_normal_numbers(cores: int) -> None:
    program = """
torch.manual_seed(5)
def step(x):
    there, ones = {"device": x.device}, torch.ones(500, device=x.device)
    integers = [
        torch.randint(4, (500,), **there), torch.randint(-2, 2, (500,), **there), torch.randint_like(ones, 4),
        torch.randint_like(ones, -2, 2), ones.clone().random_(4), ones.clone().random_(-2, 2)]
    normal = [
        torch.normal(3.0, 2.0, (500,), **there), torch.normal(3 * ones, 2.0), torch.normal(3.0, 2 * ones),
        torch.normal(3 * ones, 2 * ones)]
    return [i.float() for i in integers], [torch.stack([n.mean(), n.std(), n[0]]) for n in normal]
integers, normal = strategy.run(step, args=(inputs,))
print(json.dumps([[lists(values) for values in integers], [lists(values) for values in normal]]))
"""
    integers, normal = child(program, cores)
    for number, of_replicas in enumerate(integers):
        assert all(
            set(own) == {*range(-2 * (number % 2), 4 - 2 * (number % 2))} for own in of_replicas
        )
    for of_replicas in normal:
        assert all(abs(mean - 3) < 0.5 and abs(std - 2) < 0.5 for mean, std, _ in of_replicas)
    drawn = [tuple(own) for of_replicas in (*integers, *normal) for own in of_replicas]
    assert len(set(drawn)) == len(drawn) == 10 * cores


@pytest.mark.parametrize("cores", [1, 2])
def test_results_are_started_outside_a_step_and_nothing_else(cores: int) -> None:
    """A value that was read on one rank alone would otherwise start a graph that the other ranks do not."""
    pending, values = child(
        """
from mpistrat import xla
value = strategy.run(lambda x: x * 2, args=(inputs,))
gathered = strategy.gather(value, axis=0)  # it goes through the host, after all that was recorded
operand, other = (torch.ones(2, device=device) + i for i in (1, 2))
results = [gathered, *xla.start().all_reduce("max", [operand]), strategy.reduce("mean", value, axis=None),
    strategy.reduce("mean", value, axis=0)]
print(json.dumps([xla.start().are_pending([*results, other]), [r.tolist() for r in results]]))
""",
        cores,
    )
    assert pending == [False] * 4 + [True]
    assert values == [
        [v + 2 * r for r in range(cores) for v in (0, 2)],
        [2, 2],
        [cores - 1, cores + 1],
        cores,
    ]


@pytest.mark.parametrize("cores", [1, 2])
def test_inference_mode_goes_around_run(cores: int) -> None:
    """torch_xla makes no views in it, so that a linear layer is an error."""
    inside, around, without = child(
        """
with strategy.scope():
    model = torch.nn.Linear(2, 2)
def inferring(x):
    with torch.inference_mode():
        return model(x)
def evaluate():
    (batch,) = strategy.experimental_distribute_dataset([np.ones((replicas, 2), np.float32)])
    return strategy.gather(strategy.run(model, args=(batch,)), axis=0).tolist()
with torch.inference_mode():
    around = evaluate()
print(json.dumps([refusal(inferring, inputs), around, evaluate()]))
""",
        cores,
    )
    assert inside[0] == "RuntimeError"
    assert "inferring uses torch.inference_mode() inside run" in inside[1]
    assert "use torch.no_grad() there" in inside[1]
    assert around == without


@pytest.mark.parametrize("cores", [1, 2])
def test_gradients_of_each_example(cores: int) -> None:
    """Of torch.func's transforms, inside which a step meets its parameters for the first time."""
    found, expected = child(
        """
torch.manual_seed(0)  # with some weights the prediction is a small difference, and the rounding seen
with strategy.scope():
    model = torch.nn.Linear(2, 1)
def loss(parameters, x):
    return torch.func.functional_call(model, parameters, (x,)).square().sum()
def step(x):
    given = torch.stack([x, 2 * x, 3 * x])
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), given)
    return gradients["weight"]
found = [lists(strategy.run(step, args=(inputs,))) for _ in range(2)]
model = model.cpu()
expected = []
for r in range(replicas):
    x = torch.tensor([r + 0.0, r + 1.0])
    rows = [torch.func.grad(loss)(dict(model.named_parameters()), k * x)["weight"] for k in (1, 2, 3)]
    expected.append(torch.stack(rows).tolist())
print(json.dumps([found, expected]))
""",
        cores,
    )
    for once in found:
        assert np.ravel(once) == pytest.approx(np.ravel(expected), rel=1e-5)


def test_synchronized_batch_norm_without_momentum() -> None:
    found, expected = child(
        """
norm = torch.nn.BatchNorm1d(2, momentum=None)
whole = torch.tensor([[r + i + 0.0, r + i + 1.0] for r in range(replicas) for i in range(2)])
for factor in (1, 2, 3):
    norm(factor * whole)
expected = [norm.running_mean.tolist(), norm.running_var.tolist()]
with strategy.scope():
    model = ms.convert_sync_batchnorm(torch.nn.BatchNorm1d(2, momentum=None))
for factor in (1, 2, 3):
    strategy.run(lambda x: model(factor * torch.stack([x, x + 1])).sum(), args=(inputs,))
print(json.dumps([[model.running_mean.tolist(), model.running_var.tolist()], expected]))
""",
        2,
    )
    assert np.ravel(found) == pytest.approx(np.ravel(expected), rel=1e-5)


def test_what_cores_cannot_draw_is_refused() -> None:
    (answers,) = child(
        "print(json.dumps([refusal(lambda x: torch.multinomial(x, 3, True), inputs)]))",
        2,
    )
    assert answers[0] == "NotImplementedError"
    assert "one rank per core" in answers[1]


def test_views_of_what_a_step_makes_write_into_it() -> None:
    program = """
def step(x):
    zeros = torch.zeros(4, device=x.device)
    zeros[1:2].add_(x.sum())
    zeros.view(2, 2)[1].fill_(7)
    return zeros
print(json.dumps(lists(strategy.run(step, args=(inputs,)))))
"""
    assert child(program, 2) == [[0.0, 1.0, 7.0, 7.0], [0.0, 3.0, 7.0, 7.0]]


def test_what_was_made_outside_a_step_is_written_in_it() -> None:
    """XLA ended the process: torch_xla had said that all cores share it."""
    program = """
outside = torch.ones(2, device="xla") * 2
weight = torch.nn.Parameter(torch.ones(2))
with strategy.scope():
    module = torch.nn.Linear(2, 2, bias=False)
def step(x):
    with torch.no_grad():
        module.weight.mul_(0).add_(ms.get_replica_context().all_reduce("sum", x))
        outside.add_(ms.get_replica_context().all_reduce("sum", x))
for _ in range(2):
    strategy.run(step, args=(inputs,))
print(json.dumps([outside.tolist(), module.weight.tolist()]))
"""
    assert child(program, 2) == [[4.0, 8.0], [[1.0, 3.0], [1.0, 3.0]]]


@pytest.mark.parametrize("cores", [1, 2])
def test_what_a_step_is_given_may_be_converted_read_and_written(cores: int) -> None:
    """On several cores each of these has once ended the process, where XLA had to find out whose a value is."""
    losses, graphs, parameter, kept, reading = child(
        """
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
batch = per_replica(lambda r: torch.ones(4, 2, device=device if replicas == 1 else "cpu"))

def step(x):
    optimizer.zero_grad()
    loss = model(x.bfloat16()).float().square().mean() + 0 * model[0].weight.double().float().sum()
    loss.backward()
    optimizer.step()
    return loss.detach()

def test(x):
    return model(x.bfloat16()).float().sum()

def failing(x):
    step(x)
    raise ValueError("mine")

losses = [float(strategy.reduce("mean", strategy.run(step, args=(batch,)), axis=None)) for _ in range(3)]
try:
    strategy.run(failing, args=(batch,))
except ValueError as error:
    assert str(error) == "mine"
parameter = model[0].weight.detach().float().cpu().isfinite().all().item()
kept = [id(p) for p in model.parameters()]
told = [lists(strategy.run(test, args=(batch,)))[0] for _ in range(3)]
values = [p.detach().float().cpu().sum().item() for p in model.parameters()]
strategy.run(test, args=(batch,))
again = [p.detach().float().cpu().sum().item() for p in model.parameters()]
graphs = {c.step: c.graphs for c in strategy.extended.compilations.all}
print(json.dumps([losses, graphs, parameter, kept == [id(p) for p in model.parameters()],
    [len(set(told)), values == again]]))
""",
        cores,
    )
    assert losses[1] < losses[0]
    assert graphs["test"] <= 2
    assert parameter
    assert kept
    assert reading == [1, True]


@pytest.mark.parametrize("cores", [1, 2])
def test_batches_are_tensors_on_the_device(cores: int) -> None:
    answers = child(
        """
rows = np.arange(2 * replicas * 3, dtype=np.float32).reshape(2 * replicas, 3)
batch = (rows, np.arange(2 * replicas), torch.from_numpy(rows))
options = ms.InputOptions(experimental_fetch_to_device=False)
sources = [
    strategy.experimental_distribute_dataset([batch]),
    strategy.distribute_datasets_from_function(lambda _: [tuple(a + 0 for a in batch) for _ in range(replicas)]),
    strategy.experimental_distribute_dataset([batch], options)]
def step(*arrays):
    seen.extend([type(a).__name__, str(getattr(a, "device", "cpu")), str(a.dtype), *a.shape] for a in arrays)
    return arrays[0] * 2
answers = []
for source in sources:
    (given,), seen = list(source), []
    answers += [[seen, lists(strategy.run(step, args=given))]]
print(json.dumps(answers))
""",
        cores,
    )
    there = [
        ["Tensor", "xla:0", "torch.float32"],
        ["Tensor", "xla:0", "torch.int64"],
        ["Tensor", "xla:0", "torch.float32"],
    ]
    (shared, doubled), (own, own_doubled), (left, left_doubled) = answers
    assert [seen[:3] for seen in shared] == [seen[:3] for seen in own] == there
    assert shared[0][3:] == [2, 3]
    assert own[0][3:] == [2 * cores, 3]
    rows = [[6.0 * i + 2 * j for j in range(3)] for i in range(2 * cores)]
    assert doubled == left_doubled == [rows[2 * r : 2 * r + 2] for r in range(cores)]
    assert own_doubled == [rows] * cores
    on_host = [["ndarray", "cpu", "float32"], ["ndarray", "cpu", "int64"]]
    assert [seen[:3] for seen in left][:2] == (on_host if cores == 1 else there[:2])
    assert left[2][:3] == (["Tensor", "cpu", "torch.float32"] if cores == 1 else there[2])


@pytest.mark.parametrize("cores", [1, 2])
def test_unsigned_numbers_that_would_become_negative_are_refused(cores: int) -> None:
    answers = child(
        """
refused = []
for kind in ("uint16", "uint32", "uint64", "uint8"):
    batch = np.full((2 * replicas,), 200, kind)
    try:
        (given,) = strategy.experimental_distribute_dataset([batch])
        refused.append(lists(strategy.run(lambda x: x, args=(given,))))
    except ValueError as error:
        refused.append(str(error))
print(json.dumps(refused))
""",
        cores,
    )
    assert answers.pop() == [[200, 200]] * cores
    for line, kinds in zip(answers, ("16 int32", "32 int64", "64 int64"), strict=True):
        bits, wanted = kinds.split()
        assert f"torch_xla takes torch.uint{bits} for the signed type" in line
        assert f"convert the array to torch.{wanted}" in line


@pytest.mark.parametrize("cores", [1, 4])
def test_a_smaller_last_batch_is_told_of_or_refused_with_the_advice(cores: int) -> None:
    answers, output = child(
        """
data = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(10, 2))
loader = torch.utils.data.DataLoader(data, batch_size=4)
answers, told = [], io.StringIO()
with contextlib.redirect_stderr(told):
    try:
        for batch in strategy.experimental_distribute_dataset(loader):
            sums = strategy.run(lambda x: x[0].sum(), args=(batch,))
            answers.append(float(strategy.reduce("sum", sums, axis=None)))
    except ValueError as error:
        answers.append(str(error))
print(json.dumps([answers, told.getvalue()]))
""",
        cores,
    )
    assert answers[:2] == [28.0, 92.0]
    if cores == 1:
        assert answers[2] == 70.0
        assert "argument array 0 is float32[2,2], and was float32[4,2]" in output
        assert "DataLoader(drop_last=True)" in output
    else:  # ten examples: two of four replicas have none
        assert "replica 2 of this rank torch.float32 of [0, 2]" in answers[2]
        assert "DataLoader(drop_last=True)" in answers[2]


@pytest.mark.parametrize("cores", [1, 2])
def test_torch_functions_take_variables_and_captured_values(cores: int) -> None:
    products, doubled, sorted_rows, outside, kept, refused = child(
        """
with strategy.scope():
    weight = ms.Variable(torch.tensor([[1.0, 2.0]]))
    seen = ms.Variable(torch.zeros(2), synchronization=ms.VariableSynchronization.ON_READ,
                       aggregation=ms.VariableAggregation.SUM)

def step(x):
    return torch.nn.functional.linear(x, weight), torch.mul(inputs, 2)

strategy.run(lambda: seen.assign(torch.mul(inputs, 2)))
strategy.run(lambda: seen.assign_add(torch.mul(inputs, torch.tensor([0.0, 2.0], device=device))))
results = strategy.run(step, args=(inputs,))
rows = strategy.run(lambda: torch.sort(seen)[0])  # GSPMD ends the process unless it knows whose they are
print(json.dumps([*map(lists, (*results, rows)), torch.add(seen, torch.zeros_like(seen)).tolist(),
    weight.numpy().tolist(), refusal(lambda x: torch.add(x, x, out=weight), inputs)]))
""",
        cores,
    )
    rows = [[r + 0.0, r + 1.0] for r in range(cores)]
    assert products == [[x + 2 * y] for x, y in rows]
    assert doubled == [[2 * x, 2 * y] for x, y in rows]
    assert sorted_rows == [[2 * x, 4 * y] for x, y in rows]
    assert outside == [sum(2 * x for x, _ in rows), sum(4 * y for _, y in rows)]
    assert kept == [[1, 2]]
    assert refused[0] == "TypeError"
    assert "torch's add would write to variable" in refused[1]
