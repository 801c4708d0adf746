"""Delta coding of a model that is sent again each round: as the difference to what its receivers hold already.

    message_t = encode(w_t - h_{t-1}),  h_t = h_{t-1} + decode(message_t)

Server and clients add the same numbers, so all of them hold h_t in the same bits. What a message leaves out is part of the next
difference: this is error feedback on the server, with nothing to keep but h. Gruntkowska 2022 (EF21-P), Algorithm 1. It needs a code whose
error is smaller than what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strategies.codes.code import Code, decode, encode
from strategies.params import NotFinite, Params, Tensors, difference, require_finite


def advance(
    code: Code, held: Tensors, params: Tensors, names: Sequence[str], rng: np.random.Generator
) -> tuple[Params, bytes] | None:
    """What receivers hold after the next message, and its bytes; None if the code cannot write numbers as large as these.

    `names`: tensors, float32, that may differ. All others are taken from `params`, and must be held already.
    """
    before = {name: held[name] for name in names}
    with np.errstate(over="ignore", invalid="ignore"):
        change = difference({name: params[name] for name in names}, before)
    message = encode(code, change, rng)
    try:
        after = add(code, message, before)
    except NotFinite:
        return None
    return {name: after[name] if name in after else np.asarray(params[name]) for name in params}, message


def add(code: Code, message: bytes, held: Tensors) -> Params:
    """What a receiver of the message holds after it. `held`: the tensors that may differ.

    Raises:
        BadCode: the bytes are no message of this code for these tensors.
        NotFinite: the sum would overflow.
    """
    change = decode(code, message, {name: np.shape(value) for name, value in held.items()})
    with np.errstate(over="ignore", invalid="ignore"):
        after = {name: np.asarray(held[name] + change[name], np.float32) for name in held}
    require_finite(after, after)
    return after
