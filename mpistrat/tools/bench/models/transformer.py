"""A small transformer decoder of bytes: it has many parameters of many sizes."""

from __future__ import annotations

import torch
from torch import nn

from mpistrat.tools.bench.models.model import Model

_WIDTH = 256
_HEADS = 4
_LAYERS = 6
_LENGTH = 128
_BYTES = 256


class Transformer(nn.Module):
    """Turns tokens [batch, length] into logits [batch, classes, length]: a score of every byte as the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_BYTES, _WIDTH)
        self.places = nn.Embedding(_LENGTH, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, _LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(_WIDTH)
        self.logits = nn.Linear(_WIDTH, _BYTES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        later = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.layers(x, mask=later, is_causal=True)
        return self.logits(self.norm(x)).transpose(1, 2)


MODELS = {"transformer": Model(Transformer, (_LENGTH,), _BYTES, tokens=True, examples_per_rank=16)}
