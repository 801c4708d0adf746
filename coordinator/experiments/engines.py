"""How simulated PyTorch clients train: `simulation.engine`, and the rule by which "auto" chooses one.

    pool        one client after the other in each worker
    stacked     many clients as one batched computation: chains of dense layers
    compiled    as pool, with code compiled for the model
    cuda        many clients as one batched computation on a GPU

LiteRT and TensorFlow clients train in their own runtimes whatever the engine. Engines agree to float32 rounding, not bit for
bit, so "auto" is resolved once, from the experiment alone or, for a model of one's own, from its layers as the run begins, and the
answer is recorded with it: no measurement on the machine at hand decides. `docs/simulation-speed.md` has the measurements behind the rule.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from models import catalog, user_code
from strategies.client_rules import ClientRule
from strategies.strategy import BLOCK

Engine = Literal["pool", "stacked", "compiled", "cuda"]

PRIVATE_ROWS = "private_rows"
"""Not an engine to choose: DP-SGD, which takes its steps by itself."""

DENSE = ("logreg", "mlp")
"""Models of the catalog that are chains of dense layers."""

CHAINS = (*DENSE, "cnn")
"""Models of the catalog that are chains of convolutions and dense layers."""

WIDEST_STACKED = 256
"""The widest hidden layer of a model that was measured to train faster as a stack."""

GPU_STACK, GPU_VALUES = 256, 2**28
"""Clients and params that train at once on a GPU, at most."""

SMALL_MODEL, LARGE_JOB, SMALL_JOB = 8192, 64, 32
"""Up to so many params a stack pays more the more clients it has; a larger model fills the cache with fewer."""

COMPILED_JOB = 16
"""Clients of a job whose steps are compiled: few, so that a small cohort keeps several workers busy."""


def choose(
    name: str,
    options: Mapping[str, Any],
    adapt: str | None,
    runtimes: Collection[str],
    mode: str | None = "sync",
    rule: ClientRule | None = None,
    optimizer: str | None = "sgd",
) -> Engine | Literal["auto"]:
    """The engine that "auto" stands for. `name`, `options`, `adapt`: of the model; `mode`: of the rounds; `rule`: of the strategy;
    `optimizer`: of the clients.

    Where every client trains a chain of layers in PyTorch, `of_chain` says which one; "auto" if that is seen only once a model of one's
    own is built. Other models of the catalog, and a federation with other runtimes, which would gain little, keep "pool"; so do asynchronous
    runs, whose clients start from different models, rules whose clients do more than take steps, such as training a model of their own,
    and AdamW.
    """
    if rule is not None and not rule.is_plain_training:
        return "pool"
    if mode == "async" or optimizer == "adamw" or set(runtimes) != {"torch"} or adapt is not None:
        return "pool"
    if name not in CHAINS:
        return "pool" if name in catalog.MODELS or name.endswith(user_code.KERAS_FILE) else "auto"
    hidden = options.get("hidden", [])
    widths = hidden if isinstance(hidden, list) else []
    return of_chain(widths if name in DENSE else None)


def of_chain(hidden: Sequence[object] | None) -> Engine:
    """The engine for a chain of layers: "stacked" if it is small and dense, which needs no compiler, else "compiled", which trains as
    "pool" where there is none. `hidden`: widths of the hidden layers of a dense one; None: of one with convolutions."""
    if hidden is None or not all(isinstance(each, int) and each <= WIDEST_STACKED for each in hidden):
        return "compiled"
    return "stacked"


def find_problems(
    engine: str, name: str, adapt: str | None, runtimes: Collection[str], mode: str | None = "sync"
) -> Iterator[str]:
    """A sentence for each reason why a simulation's engine cannot train the model `name`."""
    if engine not in ("stacked", "compiled", "cuda"):
        return
    key = f'simulation.engine = "{engine}"'
    if mode == "async":
        yield f'{key} is for rounds whose clients start from one model, not for federation.mode = "async"; take "pool"'
    if "torch" not in runtimes:
        yield f'{key} is for torch clients, and federation.runtimes has none; take "pool", or give torch a share'
    if name.endswith(user_code.KERAS_FILE):
        yield f'{key} trains PyTorch models, but model.name = {name!r} is a Keras model; take "pool"'
    elif engine == "stacked" and adapt is not None:
        yield f'{key} trains all params of a model, but model.adapt = {adapt!r} freezes some; take "pool"'
    elif engine == "stacked" and name in catalog.MODELS and name not in DENSE:
        yield (
            f"{key} trains chains of dense layers, such as {' and '.join(DENSE)}, but model.name = {name!r} is none; "
            'take "pool" or "compiled"'
        )


def rule_problems(engine: str, strategy: str, rule: ClientRule) -> Iterator[str]:
    """A sentence if a simulation's engine cannot do what a strategy's `rule` asks of clients."""
    if engine in ("stacked", "cuda") and not rule.is_plain_training:
        more = "one step over all rows" if rule.full_batch else "the loss of the model before its steps"
        more = "a model of its own" if rule.has_own_model else more
        yield (
            f'simulation.engine = "{engine}" takes the steps of many clients at once, and strategy.name = {strategy!r} asks each '
            f'for {more}; take "pool"'
        )


def clients_per_job(engine: str, values: int) -> int:
    """Clients that a worker trains together, as long as the cohort has enough. `values`: params that they train."""
    if engine == "cuda":
        return max(BLOCK, min(GPU_STACK, GPU_VALUES // values))
    if engine not in ("stacked", "compiled"):
        return BLOCK
    if values <= SMALL_MODEL:
        return LARGE_JOB
    return SMALL_JOB if engine == "stacked" else COMPILED_JOB


def default_workers(engine: str) -> int:
    """Worker processes where the experiment names no number: one per core, or one that has the GPU."""
    return 1 if engine == "cuda" else len(os.sched_getaffinity(0))
