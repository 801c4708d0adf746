"""How simulated PyTorch clients train: `simulation.engine`, and the rule by which "auto" chooses one.

    pool        one client after the other in each worker
    stacked     many clients as one batched computation: chains of dense layers
    compiled    as pool, with a step compiled for the model

LiteRT and TensorFlow clients train in their own runtimes whatever the engine. Engines agree to float32 rounding, not bit for
bit, so "auto" is resolved once, from the experiment alone, and the answer is recorded with it: no measurement on the machine at
hand decides. `docs/simulation-speed.md` has the measurements behind the rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.experiments.schema import Engine, Experiment, FleetKind
from models import catalog, user_code

DENSE = ("logreg", "mlp")
"""Models of the catalog that are chains of dense layers."""

WIDEST_STACKED = 256
"""Hidden layers up to this width train faster as a stack; the products of wider ones are as fast alone."""


def choose(experiment: Experiment) -> Engine:
    """The engine that "auto" stands for.

    "stacked" where every client trains a small dense model of the catalog in PyTorch; else "pool". A model of one's own, and
    a federation with other runtimes, which would gain little, keep "pool".
    """
    model = experiment.model
    if set(experiment.federation.runtimes) != {"torch"} or model.adapt is not None:
        return "pool"
    return "stacked" if _is_small_and_dense(model.name or "", model.options) else "pool"


def _is_small_and_dense(name: str, options: Mapping[str, Any]) -> bool:
    hidden = options.get("hidden", [])
    widths = hidden if isinstance(hidden, list) else []
    return name in DENSE and all(isinstance(width, int) and width <= WIDEST_STACKED for width in widths)


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """A sentence if the engine that the experiment asks for cannot train its model."""
    engine, model = experiment.simulation.engine, experiment.model
    if fleet == "devices" or engine not in ("stacked", "compiled"):
        return
    key = f'simulation.engine = "{engine}"'
    if "torch" not in experiment.federation.runtimes:
        yield f'{key} is for torch clients, and federation.runtimes has none; take "pool", or give torch a share'
    if engine == "compiled":
        return
    if model.adapt is not None:
        yield f'{key} trains all params of a model, but model.adapt = {model.adapt!r} freezes some; take "pool"'
    elif model.name in catalog.MODELS and model.name not in DENSE:
        yield (
            f"{key} trains chains of dense layers, such as {' and '.join(DENSE)}, but model.name = {model.name!r} is none; "
            'take "pool" or "compiled"'
        )
    elif (model.name or "").endswith(user_code.KERAS_FILE):
        yield f'{key} trains PyTorch models, but model.name = {model.name!r} is a Keras model; take "pool"'
