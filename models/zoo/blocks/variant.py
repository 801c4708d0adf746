"""What differs between published transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from models.zoo.transformer import require_divisible

Bias = Literal["none", "qkv", "attention", "all"]
Activation = Literal["gelu_tanh", "gelu", "swiglu"]
Norm = Literal["layer", "rms"]
PositionKind = Literal["learned", "rope"]


@dataclass(frozen=True)
class Variant:
    """What differs between published transformers; the options of `gpt` of these names.

    Attributes:
        bias: which linear layers have one: none, query, key and value, all four of attention, or those of the
            feed-forward network too. The head never has.
        norm, epsilon: LayerNorm, or RMSNorm without a mean and a bias (Zhang 2019); what it adds to the variance.
        activation: GELU by tanh or exact, or SwiGLU, whose gate is a third matrix (Shazeer 2020).
        hidden: features of the feed-forward network; 0: 4 · D.
        kv_heads: G, which divides H; each serves H / G heads of queries; 0: H.
        head_width: W; 0: D / H.
        positions: learned rows, or rotations of query and key (Su 2021).
        max_length: rows of the learned positions; 0: as many as an example has tokens.
        rope_base: of the rotations' wavelengths.
        rope_scaling: none, or [factor, low, high, length] by which Llama 3 stretches long wavelengths.
    """

    bias: Bias = "none"
    norm: Norm = "layer"
    epsilon: float = 1e-5
    activation: Activation = "gelu_tanh"
    hidden: int = 0
    kv_heads: int = 0
    head_width: int = 0
    positions: PositionKind = "learned"
    max_length: int = 0
    rope_base: float = 10_000.0
    rope_scaling: tuple[float, ...] = ()

    def complete(self, length: int, width: int, heads: int) -> Variant:
        """With the sizes that follow from the model's in place of 0.

        Raises:
            ValueError: an unknown name, or sizes that do not fit.
        """
        for key, kind in (
            ("bias", Bias),
            ("norm", Norm),
            ("activation", Activation),
            ("positions", PositionKind),
        ):
            if (value := getattr(self, key)) not in get_args(kind):
                raise ValueError(f"{key} is {value!r}, expected one of {', '.join(get_args(kind))}")
        if not self.head_width:
            require_divisible(width, heads)
        kv_heads = self.kv_heads or heads
        if heads % kv_heads:
            raise ValueError(f"kv_heads must divide heads, got kv_heads {kv_heads} and heads {heads}")
        head_width = self.head_width or width // heads
        if self.positions == "rope" and head_width % 2:
            raise ValueError(
                f"rotations take pairs of features, but a head has {head_width}: use an even number"
            )
        if self.rope_scaling and len(self.rope_scaling) != 4:
            raise ValueError(
                f"rope_scaling is {list(self.rope_scaling)}, expected [factor, low, high, length] or []"
            )
        if self.max_length and self.max_length < length:
            raise ValueError(f"max_length is {self.max_length}, but examples have {length} tokens")
        return replace(
            self,
            hidden=self.hidden or 4 * width,
            kv_heads=kv_heads,
            head_width=head_width,
            max_length=self.max_length or length,
        )
