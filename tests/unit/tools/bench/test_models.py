"""The models are the ones that their names say."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from mpistrat.tools.bench.command_line import MODEL_NAMES
from mpistrat.tools.bench.models import MODELS, Bottleneck

# ResNet-50's: 25,557,032, as torchvision documents its weights. The others: sums of their layers' sizes.
PARAMETERS = {
    "mlp": 4 * (1024 * 1024 + 1024) + 1024 * 10 + 10,
    "mlp-large": 6 * (2048 * 2048 + 2048) + 2048 * 10 + 10,
    "resnet50": 25_557_032,
    "transformer": 256 * 256
    + 128 * 256
    + 6 * ((4 + 4 + 4) * 256 * 256 + (4 + 4 + 1) * 256 + 4 * 256)
    + 2 * 256
    + 256 * 256
    + 256,
}


def test_the_command_line_offers_every_model() -> None:
    assert tuple(MODELS) == MODEL_NAMES


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name: str) -> None:
    assert sum(p.numel() for p in MODELS[name].build().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_step(name: str) -> None:
    """The loss of a model that knows nothing is that of guessing; every parameter has a part in it."""
    torch.manual_seed(0)
    model = MODELS[name]
    module = model.build()
    inputs, targets = model.synthetic_batch(2, seed=1)
    assert inputs.shape == (2, *model.input_shape)
    assert 0 <= targets.min() <= targets.max() < model.classes
    loss = cross_entropy(module(inputs), targets)
    assert loss.item() == pytest.approx(torch.tensor(float(model.classes)).log().item(), rel=0.15)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_synthetic_batches(name: str) -> None:
    model = MODELS[name]
    first, again, other = (model.synthetic_batch(4, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_token_does_not_see_those_after_it() -> None:
    model = MODELS["transformer"]
    module = model.build().eval()
    tokens, targets = model.synthetic_batch(1, seed=0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    changed = tokens.clone()
    changed[0, 64:] = (changed[0, 64:] + 1) % model.classes
    with torch.no_grad():
        before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[..., :64], after[..., :64])
    assert not torch.allclose(before[..., 64:], after[..., 64:])


def test_pictures_are_halved_in_the_3x3_convolution() -> None:
    """That is what makes it v1.5; so many pixels are left in the end."""
    module = MODELS["resnet50"].build()
    strides = [
        [
            convolution.stride
            for convolution in block.residual.modules()
            if hasattr(convolution, "stride")
        ]
        for block in module
        if isinstance(block, Bottleneck)
    ]
    assert [block for block in strides if block[1] == (2, 2)] == [[(1, 1), (2, 2), (1, 1)]] * 3
    assert all(first == last == (1, 1) for first, _, last in strides)
    with torch.no_grad():
        assert module[:-3](torch.zeros(1, 3, 224, 224)).shape == (1, 2048, 7, 7)
