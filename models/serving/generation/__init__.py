"""Generates tokens of many sequences at once with cached keys and values.

    engine = Engine(module, spec, Options(blocks=512, max_batch=16))
    engine.add(Request("a", prompt=(3, 1, 4), max_tokens=100))
    while engine.has_work:
        for event in engine.step():
            ...

A request is checked and waits (`engine`); a step chooses tokens to compute (`scheduler`), which may be of any sequences
and at any positions (`batch`); the model computes them in one row (`cached_model`); a token is drawn for each sequence
that is computed to its end (`sampling`), and becomes text (`text`).
"""

from models.serving.generation.engine import Engine, Options
from models.serving.generation.request import (
    Event,
    InvalidRequest,
    Request,
    Sampling,
)
from models.serving.generation.support import CannotGenerate

__all__ = ["CannotGenerate", "Engine", "Event", "InvalidRequest", "Options", "Request", "Sampling"]
