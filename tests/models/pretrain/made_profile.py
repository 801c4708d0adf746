"""A profile that nobody measured: figures of round numbers, so that what follows from them can be reckoned by hand."""

from __future__ import annotations

from models.pretrain.plan import Sizes
from models.pretrain.planner.collective_cost import Link
from models.pretrain.planner.profile import Cost, Machine, Optimizer, Piece, Profile

LINK = Link(1e-5, 1e-10)


def profile(
    layers: int = 8,
    between: float = 1.0,
    per_host: int = 2,
    memory_bytes: float = 0.0,
    heavy_head: float = 1.0,
) -> Profile:
    """Layers of a million parameters that take 1 ms a row forward and 2 ms backward, most of it split by tp.

    `between`: how many times slower the link between hosts is than inside one.
    """
    outer = Link(LINK.alpha * between, LINK.beta * between)
    return Profile(
        sizes=Sizes(
            layers, heads=8, width=128, hidden=512, vocab=512, length=64, attention=True, tensor=True
        ),
        first=piece("first", 0.1, 65_536),
        layers=tuple(piece(f"layer {number}", 1.0, 1_000_000) for number in range(layers)),
        last=piece("last", 0.3 * heavy_head, 65_536),
        loss=piece("loss", 0.1, 0),
        optimizer=Optimizer(1e-6, 1e-10),
        machine=Machine(
            "cpu",
            cores=8,
            per_host=per_host,
            memory_bytes=memory_bytes,
            slowdown=((8, 1.0),),
            inside=LINK,
            between=outer,
        ),
    )


def piece(name: str, milliseconds: float, values: int) -> Piece:
    """Takes so long a row, keeps 10 rows' worth of 32 KiB a row, 1 if it recomputes all."""
    forward = Cost(split_per_row=milliseconds * 1e-3)
    row = 32_768.0
    layer = name.startswith("layer")
    policies = {"none": 10.0, "selective": 5.0, "full": 1.0} if layer else {"none": 2.0}
    again = {"none": 2.0, "selective": 2.2, "full": 3.0}
    return Piece(
        name,
        split_values=values,
        tensors=8 if values else 0,
        forward=forward,
        backward={policy: Cost(split_per_row=again[policy] * milliseconds * 1e-3) for policy in policies},
        kept={policy: Cost(per_row=rows * row) for policy, rows in policies.items()},
        forward_bytes={policy: (Cost(per_row=rows * row),) for policy, rows in policies.items()},
        backward_bytes={policy: (Cost(split_fixed=4 * values, per_row=12 * row),) for policy in policies},
        output_bytes=row,
        columns=4 if layer else 0,
        rows=2 if layer else 0,
        attentions=int(layer),
    )
