"""Arrays in messages: every dtype and layout arrives as it was, whichever way it goes."""

import pickle

import numpy as np
import pytest
import torch

from mpistrat.parameter_server.protocol.messages import (
    InlineTensor,
    SharedTensor,
    TensorSpec,
    inline,
    pack,
    unpack,
)
from mpistrat.parameter_server.rpc.segments import Buffers, Mappings

NUMPY = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]
TORCH = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
TORCH += ["float64", "complex64", "complex128", "float8_e4m3fn"]
SHAPES = [(), (0,), (3, 0), (1,), (3, 5), (40, 300)]


def array_of(library: str, dtype: str, shape: tuple[int, ...]):
    values = np.random.default_rng(0).integers(0, 2, shape)
    if library == "numpy":
        return np.asarray(values).astype(dtype)
    return torch.from_numpy(np.asarray(values)).to(getattr(torch, dtype))


def sent(array, by_memory: bool):
    """What comes of `array` through a message."""
    packed, region = pack([array], Buffers() if by_memory else None)
    (tensor,) = pickle.loads(pickle.dumps(packed, protocol=5))
    assert isinstance(tensor, SharedTensor) == (region is not None)
    return unpack(tensor, Mappings()), region


def assert_same(first, second) -> None:
    assert type(first) is type(second) or isinstance(first, np.ndarray)
    assert first.dtype == second.dtype
    assert tuple(first.shape) == tuple(second.shape)
    if isinstance(first, torch.Tensor) and first.numel():
        first, second = (x.contiguous().view(-1).view(torch.uint8) for x in (first, second))
        assert torch.equal(first, second)
    elif not isinstance(first, torch.Tensor):
        assert np.array_equal(first, second)


@pytest.mark.parametrize("by_memory", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("library", "dtype"), [("numpy", d) for d in NUMPY] + [("torch", d) for d in TORCH]
)
@pytest.mark.filterwarnings("error")
def test_every_dtype_and_shape(library: str, dtype: str, shape, by_memory: bool) -> None:
    array = array_of(library, dtype, shape)
    came, _ = sent(array, by_memory)
    assert_same(came, array)
    spec = TensorSpec.of(array)
    assert spec.nbytes == array.nbytes
    assert_like(spec.empty(), array)


def assert_like(empty, array) -> None:
    assert type(empty) is type(array) or isinstance(empty, np.ndarray)
    assert (empty.dtype, tuple(empty.shape)) == (array.dtype, tuple(array.shape))


def layouts():
    whole = np.arange(30_000.0).reshape(100, 300)
    tensor = torch.arange(30_000.0).reshape(100, 300)
    return {
        "transposed": whole.T,
        "steps": whole[::2, ::-3],
        "fortran": np.asfortranarray(whole),
        "repeated": np.broadcast_to(np.arange(300.0), (100, 300)),
        "other bytes first": whole.astype(">f8"),
        "tensor, transposed": tensor.T,
        "tensor, steps": tensor[::2, 5::3],
        "tensor, repeated": torch.arange(300.0).expand(100, 300),
        "tensor, bfloat16, transposed": tensor.to(torch.bfloat16).T,
        "small, transposed": whole[:5, :3].T,
        "small, tensor": tensor[:5, :3].T,
    }


@pytest.mark.parametrize("by_memory", [False, True])
@pytest.mark.parametrize("name", layouts())
def test_layouts(name: str, by_memory: bool) -> None:
    array = layouts()[name]
    came, _ = sent(array, by_memory)
    assert_same(came, array)


def test_parameters_and_numbers() -> None:
    parameter = torch.nn.Parameter(torch.ones(3000))
    assert_same(sent(parameter, True)[0], parameter.detach())
    assert_same(sent(np.float32(3), True)[0], np.asarray(3, np.float32))


def test_small_ones_travel_in_the_message_and_large_ones_share_a_region() -> None:
    buffers = Buffers()
    packed, region = pack([np.zeros(10), np.zeros(20)], buffers)
    assert region is None
    assert all(isinstance(tensor, InlineTensor) for tensor in packed)
    arrays = [np.arange(2000.0), np.arange(3), np.ones((7, 500), np.float32)]
    packed, region = pack(arrays, buffers)
    assert region is not None
    assert all(isinstance(tensor, SharedTensor) for tensor in packed)
    mappings = Mappings()
    for tensor, array in zip(packed, arrays, strict=True):
        assert_same(unpack(tensor, mappings), array)
        assert tensor.handle.first % 64 == 0


def test_what_is_in_memory_of_both_is_not_copied() -> None:
    packed, region = pack([np.zeros(5000)], Buffers())
    assert region is not None
    came = unpack(packed[0], Mappings())
    region.memory[:8] = np.frombuffer(np.float64(7).tobytes(), np.uint8)
    assert came[0] == 7


def test_a_copy_is_its_own() -> None:
    array = np.zeros(3)
    view, copy = inline(array), inline(array).copied()
    array[:] = 1
    assert unpack(view, Mappings()).tolist() == [1, 1, 1]
    assert unpack(copy, Mappings()).tolist() == [0, 0, 0]
