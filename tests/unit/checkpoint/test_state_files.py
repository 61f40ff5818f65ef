"""A state comes back bit for bit, types included; a file of arrays is one of safetensors."""

import collections
import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mpistrat.checkpoint import durable_files
from mpistrat.checkpoint.state_tree import Encoder, decode
from mpistrat.checkpoint.tensor_file import Snapshot, parse


def round_trip(state, folder: Path):
    """`state` as it comes back from disk."""
    encoder = Encoder()
    tree = encoder.encode(state)
    snapshot = Snapshot(encoder.arrays)
    path = str(folder / "arrays.safetensors")
    written = durable_files.write(path, [snapshot.header, snapshot.values])
    return decode(
        json.loads(json.dumps(tree, allow_nan=False)), parse(durable_files.read(path, *written))
    )


def bits(value):
    """What tells values apart that must not be mixed up."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        raw = flat.view(torch.uint8).tolist() if flat.numel() else []
        return ("tensor", value.dtype, tuple(value.shape), raw)
    if isinstance(value, (np.ndarray, np.generic)):
        return (type(value), value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(item) for item in value])
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, complex):
        return (complex, value.real.hex(), value.imag.hex())
    return (type(value), value)


PLAIN = [
    *(None, True, False, 0, -1, 10**40, "", "naïve \ud800 \x00", b"", b"\x00\xff"),
    *(0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan),
    *(1 + 2j, complex(math.nan, -0.0)),
    *([], [1, [2.0, None]], (), (1, (2, "3")), {}, {"a": {"b": []}}),
    {0: 1, "0": 2, (1, 2): 3, None: 4, True: 5, 1.5: 6},
    collections.OrderedDict(b=1, a=2),
    collections.Counter({30: 1, 80: 2}),
    *(torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value, tmp_path: Path) -> None:
    assert bits(round_trip({"it": value}, tmp_path)) == bits({"it": value})


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        noise %= 2
    state = {"odd": torch.ones(3, dtype=torch.uint8), "it": noise.view(dtype)}
    back = round_trip(state, tmp_path)
    assert bits(back) == bits(state)
    assert back["it"].dtype == dtype


def test_tensors_of_every_shape(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "0-dim": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.tensor([1.0]).expand(5),
        "shared": base,
        "shared again": base,
        "part of it": base[1],
        "needs a gradient": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    assert bits(round_trip(state, tmp_path)) == bits(state)


@pytest.mark.parametrize(
    "array",
    [
        *(np.arange(6).reshape(2, 3).T, np.float64(0.1), np.int8(-3), np.bool_(True)),
        *(
            np.empty((0, 2)),
            np.array(["a", "bcd"]),
            np.array([b"x", b"yz"]),
            np.arange(3, dtype=">i4"),
        ),
        *(
            np.array(["2026-11-22"], "datetime64[D]"),
            np.ones(2, np.longdouble),
            np.ones(2, complex),
        ),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_numpy_arrays(array, tmp_path: Path) -> None:
    state = {"bytes before": np.zeros(3, np.int8), "it": array, "after": torch.ones(1)}
    assert bits(round_trip(state, tmp_path)) == bits(state)


def test_names_that_look_alike(tmp_path: Path) -> None:
    first, second, third = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    state = {
        "a.b": first,
        "a": {"b": second, 0: first, "0": third},
        "__metadata__": third,
        "": first,
    }
    assert bits(round_trip(state, tmp_path)) == bits(state)


def test_an_optimizer_and_a_module_go_on(tmp_path: Path) -> None:
    """The versions that a module's state_dict carries are kept, too."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.5, 0.9))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    for part in (model, optimizer):
        state = part.state_dict()
        back = round_trip(state, tmp_path)
        (tmp_path / "arrays.safetensors").unlink()
        assert bits(back) == bits(dict(state) if part is optimizer else state)
        assert getattr(back, "_metadata", None) == getattr(state, "_metadata", None)
        part.load_state_dict(back)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"f": {1: [print]}}, r"f\.1\.0 is a builtins.builtin_function_or_method"),
        ({"s": {1, 2}}, "s is a builtins.set"),
        ({"o": np.array([None])}, "o is a numpy.ndarray"),
        ({"d": collections.defaultdict(list)}, "d is a collections.defaultdict"),
        ({"n": torch.eye(2).to_sparse()}, "n is a torch.sparse_coo tensor"),
        ({"n": torch.ones(2, device="meta")}, "tensor on meta"),
    ],
    ids=["function", "set", "objects", "defaultdict", "sparse", "meta"],
)
def test_what_cannot_come_back_is_refused(value, named: str) -> None:
    with pytest.raises(TypeError, match=named):
        Encoder().encode(value)


def test_a_plain_reader_finds_the_names_of_a_state_dict(tmp_path: Path) -> None:
    tied = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"a": tied, "b": tied, "c": torch.nn.Linear(4, 2).bfloat16()})
    round_trip(model.state_dict(), tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "arrays.safetensors")
    assert sorted(loaded) == sorted(model.state_dict())
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_the_library_and_we_read_each_other(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    state = {str(dtype): torch.ones(3, 2).to(dtype) for dtype in DTYPES[:13]}
    safetensors.torch.save_file(state, path)
    stored = parse(np.frombuffer(path.read_bytes(), np.uint8).copy())
    assert bits({name: stored[name].tensor() for name in state}) == bits(state)
    round_trip(state, tmp_path)
    theirs = safetensors.torch.load_file(tmp_path / "arrays.safetensors")
    assert bits({name: theirs[name] for name in state}) == bits(state)


def test_a_snapshot_takes_the_memory_of_the_one_before() -> None:
    first = Snapshot({"a": np.arange(10.0)})
    second = Snapshot({"a": np.arange(5.0)}, first.buffer)
    assert second.buffer is first.buffer
    assert second.values.view(np.float64).tolist() == [0, 1, 2, 3, 4]
    assert Snapshot({"a": np.arange(11.0)}, first.buffer).buffer is not first.buffer
