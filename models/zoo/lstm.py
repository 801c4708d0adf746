"""A language model of stacked LSTM layers (Hochreiter 1997; Zaremba 2014), each a layer of a pipeline.

Shapes: B rows, T tokens, D width.
"""

from __future__ import annotations

import torch
from torch import nn

from models.zoo.gpt import linear, require_dropout
from models.zoo.layout import Chain, Layout
from models.zoo.spec import ModelSpec
from models.zoo.transformer import sequence_length


class LSTMModel(Chain):
    """x [B, T] token ids -> logits [B, T, vocab]; position t sees tokens 0 to t only. Every row starts with state 0."""

    def __init__(self, vocab: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleDict({str(index): Layer(width, dropout) for index in range(layers)})
        self.head = linear(width, vocab)


class Layer(nn.Module):
    """[B, T, D] -> [B, T, D]: dropout, as between layers only, then one LSTM.

    Its params are passed to torch's operator at every call: `nn.LSTM` keeps references to them, which become stale when
    sharding replaces them. The operator puts time first in memory; hidden states and their gradients are returned with
    rows first, as stages send them.
    """

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        bound = width**-0.5
        for name, shape in (
            ("weight_input", (4 * width, width)),
            ("weight_hidden", (4 * width, width)),
            ("bias_input", (4 * width,)),
            ("bias_hidden", (4 * width,)),
        ):
            self.register_parameter(name, nn.Parameter(torch.empty(shape).uniform_(-bound, bound)))
        with torch.no_grad():
            # the second quarter is the forget gate, which should start open (Jozefowicz 2015)
            self.get_parameter("bias_input")[width : 2 * width].fill_(1.0)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        params: list[torch.Tensor] = [
            self.get_parameter(name)
            for name in ("weight_input", "weight_hidden", "bias_input", "bias_hidden")
        ]
        h = self.dropout(h.view_as(h))
        if h.requires_grad:
            h.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
        state = h.new_zeros(1, h.shape[0], h.shape[2])
        outputs: torch.Tensor
        outputs, _, _ = torch.lstm(
            h,
            (state, state),
            params,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=self.training,
            bidirectional=False,
            batch_first=True,
        )
        return outputs.contiguous()


def spec(
    input_shape: tuple[int, ...], classes: int, width: int = 128, layers: int = 2, dropout: float = 0.0
) -> ModelSpec:
    """`input_shape` is (T,); `classes` is the vocabulary of both input and labels.

    Raises:
        ValueError: not token sequences, or an invalid size.
    """
    length = sequence_length(input_shape)
    require_dropout(dropout)
    if min(width, layers) < 1:
        raise ValueError(f"width and layers are 1 or more, got width {width} and layers {layers}")
    return ModelSpec(
        "lstm",
        lambda: LSTMModel(classes, width, layers, dropout),
        input_shape,
        classes,
        input_dtype="int32",
        task="next_token",
        options={"width": width, "layers": layers, "dropout": dropout},
        vocab=classes,
        layout=Layout(order=("embedding", "layers.*", "head"), width=width, hidden=4 * width, length=length),
    )
