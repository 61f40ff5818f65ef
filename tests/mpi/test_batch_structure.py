"""A batch's structure is the program's: it is looked into only to cut it, and where a replica has no examples."""

import collections
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import mpistrat as ms
from mpistrat.input.splitting import slice_bounds
from support.rank_errors import assert_usable, errors_of_ranks

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(scope="module", params=[1, 2], ids=["k=1", "k=2"])
def strategy(request):
    devices = [f"cpu:{i}" for i in range(request.param)]
    return ms.MultiWorkerMirroredStrategy(devices=devices, deterministic=True)


class Graphs:
    """A sequence that is no list, with tensors in attributes."""

    def __init__(self, graphs):
        self.nodes = torch.cat(graphs)
        self.sizes = [len(graph) for graph in graphs]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return self.nodes.split(self.sizes)[index]


@dataclass
class Record:
    nodes: torch.Tensor


class Named(NamedTuple):
    size: torch.Size
    mask: Any
    names: list[str]


class Encoding(collections.UserDict):
    """A mapping whose constructor takes other arguments, and that has an attribute."""

    def __init__(self, nodes, origin):
        super().__init__(nodes=nodes)
        self.origin = origin


def nodes_of(i):
    return torch.full((1 + i % 3, 2), float(i))


# Each makes the second part of a batch of the numbers of its examples; the first part is a tensor of the numbers.
KINDS = {
    "texts": lambda numbers: tuple(f"image{i}.png" for i in numbers),
    "boxes": lambda numbers: [{"boxes": nodes_of(i), "id": i} for i in numbers],
    "graphs": lambda numbers: Graphs([*map(nodes_of, numbers)]),
    "packed": lambda numbers: pack_sequence([*map(nodes_of, numbers)], enforce_sorted=False),
    "dataclass": lambda numbers: Record(torch.cat([*map(nodes_of, numbers)])),
    "namedtuple": lambda numbers: Named(torch.Size(numbers), None, [*map(str, numbers)]),
    "mapping": lambda numbers: Encoding(torch.cat([*map(nodes_of, numbers)]), str(numbers)),
    "images": lambda numbers: [nodes_of(i) for i in numbers],
    "nested": lambda numbers: torch.nested.nested_tensor([*map(nodes_of, numbers)]),
    "sometimes None": lambda numbers: None if sum(numbers) % 2 else torch.tensor(numbers),
}
OPAQUE = ["graphs", "packed", "dataclass", "nested"]


def plain(part):
    """`part` as lists and texts, which `==` compares."""
    if isinstance(part, torch.Tensor):
        return part.tolist() if not part.is_nested else [plain(item) for item in part.unbind()]
    if isinstance(part, PackedSequence):
        return "packed", [plain(item) for item in part]
    if isinstance(part, (list, tuple)):
        return type(part).__name__, [plain(item) for item in part]
    if isinstance(part, (dict, collections.UserDict)):
        return {key: plain(item) for key, item in part.items()}, getattr(part, "origin", None)
    if isinstance(part, (Graphs, Record)):
        return type(part).__name__, plain(part.nodes)
    return part


def loader(kind, number, batch_size):
    def collate(numbers):
        return torch.tensor(numbers), KINDS[kind](numbers)

    return DataLoader(range(number), batch_size, collate_fn=collate)


@pytest.mark.parametrize("kind", KINDS)
def test_each_replica_gets_what_the_program_makes(strategy, kind):
    """Also where its batches differ in structure from step to step, and between the replicas of a rank."""
    replicas = strategy.num_replicas_in_sync
    batch_size = 3 * replicas
    number = 3 * batch_size - 1  # the last replica's last batch has an example less
    seen = []
    for step in strategy.prepare(loader(kind, number, batch_size)):
        for numbers, part in strategy.experimental_local_results(step):
            assert plain(part) == plain(KINDS[kind](numbers.tolist()))
            seen += numbers.tolist()
        taken = strategy.run(lambda numbers, part: (len(numbers), type(part)), args=step)
        assert len(taken) == 2
    assert sorted(chain(*WORLD.allgather(seen))) == list(range(number))


@pytest.mark.parametrize("kind", ["texts", "boxes", "images"])
def test_lists_of_examples_are_empty_where_there_are_no_examples(strategy, kind):
    replicas = strategy.num_replicas_in_sync
    steps = list(strategy.prepare(loader(kind, 3 * replicas + 1, 3 * replicas)))
    assert len(steps) == 2
    parts = strategy.experimental_local_results(steps[1])
    sizes = WORLD.allgather([(len(numbers), len(part)) for numbers, part in parts])
    assert sorted(chain(*sizes)) == [(0, 0)] * (replicas - 1) + [(1, 1)]
    assert {type(part) for _, part in parts} == {type(KINDS[kind]([0]))}


@pytest.mark.parametrize("kind", OPAQUE)
def test_a_batch_that_cannot_be_empty_is_refused_before_the_epoch(strategy, kind):
    replicas = strategy.num_replicas_in_sync
    steps = []

    def read():
        steps.extend(strategy.prepare(loader(kind, 3 * replicas + 1, 3 * replicas)))

    errors = errors_of_ranks(read)
    if replicas == 1:
        assert len(steps) == 2
        return
    assert {name for name, _, _ in errors} == {"ValueError"}
    assert all("cannot be made a batch of no examples" in text for _, text, _ in errors)
    assert steps == []
    assert_usable(strategy)


@pytest.mark.filterwarnings("ignore:each of the .* ranks reads all batches")
def test_global_batches_are_cut_by_examples(strategy):
    """Lists of examples with the arrays, also without any; lists of arrays of all examples array by array."""
    number = 5
    x = torch.arange(float(number))[:, None] * torch.ones(7)
    texts = [f"text {i}" for i in range(number)]
    boxes = [{"boxes": nodes_of(i)} for i in range(number)]
    images = [torch.ones(channels, 4) for channels in (3, 1, number, 3, number)]
    batches = [
        {"x": x, "images": images, "texts": tuple(texts), "views": [x, [x + 1]], "none": None},
        (tuple(texts), boxes),
        [x, x.int()],
    ]
    share = strategy.extended.input.share
    bounds = [slice_bounds(number, piece, share.num_replicas) for piece in share.pieces]
    first, second, third = map(
        strategy.experimental_local_results, strategy.experimental_distribute_dataset(batches)
    )
    for i, (begin, end) in enumerate(bounds):
        assert torch.equal(first[i]["x"], x[begin:end])
        assert first[i]["texts"] == tuple(texts[begin:end])
        assert torch.equal(first[i]["views"][1][0], x[begin:end] + 1)
        assert first[i]["none"] is None
        assert plain(first[i]["images"]) == plain(images[begin:end])
        assert second[i][0] == tuple(texts[begin:end])
        assert plain(second[i][1]) == plain(boxes[begin:end])
        assert torch.equal(third[i][1], x[begin:end].int())


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:each of the .* ranks reads all batches")
@pytest.mark.parametrize(
    "batch",
    [
        lambda: {"x": torch.ones(3, 2), "images": [torch.ones(3, 4, 4)] * 3},
        lambda: ([torch.ones(3, 4, 4)] * 4, [torch.ones(3)] * 4),
        lambda: {"x": torch.ones(3, 2), "captions": ["two", "for", "each", "of", "the", "x"]},
    ],
    ids=["images or views", "four or three", "neither"],
)
def test_a_list_that_may_be_examples_or_not(strategy, batch):
    """It says how to decide. Cut the wrong way, images would lose channels, and texts belong to other examples."""
    distributed = strategy.experimental_distribute_dataset([batch()])
    errors = errors_of_ranks(lambda: list(distributed))
    assert {name for name, _, _ in errors} == {"ValueError"}
    assert all("Put arrays of all examples in a dict" in text for _, text, _ in errors)


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:each of the .* ranks reads all batches")
def test_lists_of_examples_in_batches_that_are_joined(strategy):
    """AutoShardPolicy.OFF cuts the examples of all batches anew."""
    replicas = strategy.num_replicas_in_sync
    numbers = np.arange(2 * replicas)
    batches = [(half, [*map(str, half)]) for half in np.split(numbers, 2)]
    options = ms.InputOptions(experimental_auto_shard_policy=ms.AutoShardPolicy.OFF)

    class Sized(list):
        batch_size = 2 * replicas

    for step in strategy.experimental_distribute_dataset(Sized(batches), options):
        for part, texts in strategy.experimental_local_results(step):
            assert texts == [*map(str, part)]
            assert len(part) == 2


def test_a_rank_without_batches_learns_lists_of_others(strategy):
    """A dataset function whose last rank has no batch: the texts there are none."""

    def make(context):
        if 0 < context.input_pipeline_id == SIZE - 1:
            return []
        return [(np.arange(2), ("a", "b"))] * strategy.extended.num_local_replicas

    for step in strategy.distribute_datasets_from_function(make):
        for numbers, texts in strategy.experimental_local_results(step):
            assert texts == ("a", "b")[: len(numbers)]
            assert len(numbers) == (0 if 0 < RANK == SIZE - 1 else 2)
