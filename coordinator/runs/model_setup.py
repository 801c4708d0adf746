"""What a run needs, in simulation and on devices alike: data and model, set up in worker processes, and the engine's plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import adapters, codes
from coordinator.experiments.asynchrony import mode_problems
from coordinator.experiments.by_strategy import server_data
from coordinator.experiments.defaults import half
from coordinator.experiments.engines import PRIVATE_ROWS, rule_problems
from coordinator.experiments.privacy import secure_aggregation
from coordinator.experiments.schema import Experiment, Federation
from coordinator.experiments.sections import Local
from coordinator.experiments.strategy_choice import local_problems, size_problems
from coordinator.experiments.validation import score_problem
from coordinator.reports.progress import Progress
from coordinator.rounds.closing import Closing
from coordinator.rounds.plan import Asynchrony, LocalWork, RunPlan
from coordinator.runs.initial_params import decode_init
from coordinator.workers.pool import WorkerPool
from edge_client.files import default_cache_dir
from edge_client.processes.process import Launch
from edge_client.wire import arrays
from models.conversion import request as export_request
from models.conversion.request_cache import Exported
from strategies import presets, staleness
from strategies.local_optimizers import AdamW
from strategies.params import Params
from strategies.strategy import Strategy


def load_data(
    experiment: Experiment, folder: Path, pool: WorkerPool, data_dir: Path | None, *, quotes: bool = True
) -> dict[str, Any]:
    """Description of the data; loads it into the workspace `folder` unless it is there.

    `quotes`: whether errors may quote the files.

    Raises:
        UserError: the data or its description is wrong.
    """
    done = folder / "found.json"
    if done.exists():
        return _with_positive(experiment, json.loads(done.read_text("utf-8")))
    request = {
        "kind": "prepare",
        "folder": str(folder),
        "seed": experiment.data_seed,
        "data": experiment.data.to_load,
        "clients": experiment.federation.clients,
        "data_dir": str(data_dir) if data_dir else None,
        "quotes": quotes,
        "sample": experiment.evaluation.sample,
        "server": server_data.request_of(
            experiment.server_data, with_labels=presets.uses_server_labels(experiment.strategy.name)
        )
        if presets.uses_server_data(experiment.strategy.name)
        else None,
    }
    return _with_positive(experiment, pool.run_one(request).values)


def _with_positive(experiment: Experiment, data_info: Mapping[str, Any]) -> dict[str, Any]:
    """The description with `positive`, the index of the positive class of two."""
    index = positive_class(experiment, data_info["class_names"], data_info["classes"], data_info["task"])
    return {**data_info, "positive": index}


def positive_class(experiment: Experiment, names: Sequence[str], classes: int, task: str) -> int:
    """The index of the class that `data.positive` names; without the key the second one's, which counts only if there are two.

    Raises:
        UserError: the data has no such class, or is not of two classes.
    """
    positive = experiment.data.positive
    if positive is None:
        return 1
    if task != "classification" or classes != 2:
        has = f"has {classes} classes" if task == "classification" else f'is for data.task = "{task}"'
        raise UserError(
            f"data.positive = {positive!r} names one of two classes, but the data {has}; leave data.positive out"
        )
    known = [str(name) for name in names] or ["0", "1"]
    if positive not in known:
        raise UserError(
            f"data.positive = {positive!r} is no class of the data; expected {' or '.join(known)}"
        )
    return known.index(positive)


def set_up_model(
    experiment: Experiment,
    model: Mapping[str, Any],
    folder: Path,
    pool: WorkerPool,
    init: bytes | None,
    ids: int,
) -> tuple[dict[str, Any], Params, tuple[str, ...]]:
    """The model's description for workers, the initial params, and the names of the trained ones.

    `init`: contents of the file that `model.init` names. `ids`: number of token ids of the data, 0 if it has none or they
    are unknown. If the run adapts a model, its frozen backbone is in `folder` afterwards.

    Raises:
        UserError: the model cannot be built, or `model.init` does not fit it.
    """
    params, trainable, statistics = build_model(experiment, model, pool, ids)
    if init is not None:
        params = decode_init(f"model.init = {experiment.model.init!r}", init, params)
    _require_statistics(experiment, params, statistics)
    if experiment.model.adapt is None:
        return dict(model), params, trainable
    adapters.freeze(params, folder)
    adapted = adapters.adapt_model(experiment, model, folder)
    params, trainable, _ = build_model(experiment, adapted, pool, ids)
    return adapted, params, trainable


def build_model(
    experiment: Experiment, model: Mapping[str, Any], pool: WorkerPool, ids: int
) -> tuple[Params, tuple[str, ...], tuple[str, ...]]:
    """Fresh params of the model from the experiment's seed, the names of the trained ones, and the layers that normalise by
    statistics of training rows.

    Raises:
        UserError: the model cannot be built, or not for the requested runtimes.
    """
    reply = pool.run_one({"kind": "initial", "model": dict(model), "seed": experiment.seed})
    if "torch" in experiment.federation.runtimes and reply.values["framework"] == "keras":
        raise UserError(
            f"federation.runtimes asks for torch, as it does unless set, but model.name = {experiment.model.name!r} is a "
            "Keras model, which trains in: litert, tensorflow; leave torch out: --set 'federation.runtimes={litert=1}'"
        )
    if "tensorflow" in experiment.federation.runtimes and not reply.values["twin"]:
        raise UserError(
            f"federation.runtimes asks for tensorflow, but model.name = {experiment.model.name!r} has no TensorFlow "
            "twin; its builder may return a ModelSpec with tensorflow_twin, or leave tensorflow out"
        )
    vocab = reply.values["vocab"]
    if vocab is not None and ids > vocab:
        raise UserError(
            f"the data has token ids 0 to {ids - 1}, model.name = {experiment.model.name!r} takes 0 to {vocab - 1}: make its "
            "embedding larger (the catalog's models: --set model.vocab=…), or the vocabulary smaller (data.vocab)"
        )
    if reply.values.get("masked"):
        raise UserError(
            f'model.name = {experiment.model.name!r} finds hidden tokens (objective = "masked"), and clients hide none: it '
            "would see the tokens that it is to predict; pretrain it with `fedloop pretrain`, and federate it with "
            'objective = "classify"'
        )
    return (
        arrays.decode(reply.blobs[0]),
        tuple(reply.values["trainable"]),
        tuple(reply.values.get("statistics", ())),
    )


def _require_statistics(experiment: Experiment, params: Params, layers: tuple[str, ...]) -> None:
    """Refuses models without running statistics: clients do not change these, because they cannot be averaged."""
    fresh = [
        layer
        for layer in layers
        if not params[f"{layer}.running_mean"].any() and (params[f"{layer}.running_var"] == 1).all()
    ]
    if fresh:
        begins = (
            f"model.init = {experiment.model.init!r} has"
            if experiment.model.init
            else "without model.init it has"
        )
        raise UserError(
            f"model.name = {experiment.model.name!r}: layer {fresh[0]!r} is a BatchNorm, whose running statistics clients "
            f"keep as they are, and {begins} none yet (mean 0, variance 1): take GroupNorm or LayerNorm "
            '(the catalog\'s models: norm = "group"), or begin with a model that was pretrained, as model.init'
        )


def export_model(
    experiment: Experiment,
    model: Mapping[str, Any],
    cache_dir: Path | None = None,
    launch: Launch | None = None,
) -> Exported:
    """The model's artifact for LiteRT clients, from the cache or converted. `launch`: how to start the converter.

    Raises:
        UserError: the model cannot be exported.
    """
    request = export_request.ExportRequest(
        model=model["name"],
        options=model["options"],
        input_shape=tuple(model["input_shape"]),
        classes=model["classes"],
        input_dtype=model["input_dtype"],
        task=model["task"],
        batch_size=experiment.local.batch_size,
    )
    try:
        cache = cache_dir or default_cache_dir()
        return export_request.export(request, cache, code_folder=Path.cwd(), launch=launch)
    except export_request.ExportError as error:
        raise UserError(
            f"model {model['name']!r} cannot be exported for LiteRT clients: {error}; "
            "without them: --set 'federation.runtimes={torch=1}'"
        ) from None


def require_scores(experiment: Experiment, blocking_reason: str | None) -> None:
    """Refuses keys that need the rounds' scores. `blocking_reason`: the reason why there are none, None if there are.

    Raises:
        UserError: naming the key, its value and the reason.
    """
    if blocking_reason is not None and (problem := score_problem(experiment.federation, blocking_reason)):
        raise UserError(problem)


def make_run_plan(
    experiment: Experiment, strategy: Strategy, trainable: Sequence[str], clients_per_round: int
) -> RunPlan:
    """The plan of a resolved experiment. `trainable`: names of the tensors that clients train.

    Raises:
        UserError: the strategy, a user's own, does not work in the experiment's mode or with its code, rounds have too few clients
            for it, or its patterns of local tensors do not fit the model.
    """
    federation, local = experiment.federation, experiment.local
    assert local.lr is not None and federation.mode is not None  # resolved
    for problem in (
        *mode_problems(strategy.name, strategy.modes, federation.mode),
        *size_problems(strategy, clients_per_round, federation.relays),
        *secure_aggregation.size_problems(experiment, strategy, clients_per_round),
        *local_problems(strategy, local),
        *codes.strategy_problems(experiment, strategy),
    ):
        raise UserError(problem)
    try:
        shared = presets.share(strategy, trainable)
    except presets.OptionError as error:
        raise UserError(f"strategy.{error.option}: {error}") from None
    asynchrony = _asynchrony(federation, clients_per_round)
    wanted = clients_per_round
    if asynchrony is not None:
        wanted = federation.buffer or half(asynchrony.concurrency)
    return RunPlan(
        seed=experiment.seed,
        rounds=federation.rounds,
        strategy=strategy,
        local=LocalWork(
            local.batch_size,
            local.lr,
            local.epochs,
            local.steps,
            local.momentum,
            local.clip_grad_norm,
            _optimizer(local),
        ),
        trainable=shared,
        closing=Closing(wanted, federation.deadline_seconds),
        early_stop=federation.early_stop,
        keep_best=federation.keep == "best",
        by_metric=federation.metric != "loss",
        over_select=federation.over_select,
        min_updates=federation.min_updates,
        max_examples=federation.max_examples,
        outlier_factor=federation.outlier_factor,
        weight_cap=federation.weight_cap,
        asynchrony=asynchrony,
        records=experiment.record is not None,
        code=codes.make_code(experiment.uplink),
        downlink=codes.make_code(experiment.downlink),
    )


def _optimizer(local: Local) -> AdamW | None:
    if local.optimizer != "adamw":
        return None
    assert local.beta1 is not None and local.beta2 is not None  # resolved
    assert local.eps is not None and local.weight_decay is not None
    return AdamW(local.beta1, local.beta2, local.eps, local.weight_decay, local.keep_moments or False)


def _asynchrony(federation: Federation, clients_per_round: int) -> Asynchrony | None:
    if federation.mode == "sync":
        return None
    assert federation.staleness is not None  # resolved
    return Asynchrony(
        federation.concurrency or clients_per_round,
        staleness.parse(federation.staleness),
        federation.max_staleness,
    )


def set_up_engine(
    experiment: Experiment,
    strategy: Strategy,
    model: Mapping[str, Any],
    pool: WorkerPool,
    progress: Progress,
) -> dict[str, Any]:
    """What workers need to know of the engine, as part of the model's description, and `chosen`, the one that the experiment means.

    If there is no compiler for "compiled" here, it is "pool", and a note says so.

    Raises:
        UserError: the engine cannot train the model, or do what the strategy asks of clients.
    """
    engine, batch_size = experiment.simulation.engine, experiment.local.batch_size
    for problem in rule_problems(engine, strategy.name, strategy.client_rule):
        raise UserError(problem)
    if experiment.privacy.mechanism == "example":
        for notice in (notices := require_row_gradients(experiment, model, pool)):
            progress.note(notice)
        return {"engine": "pool", "chosen": "pool", "batch_size": batch_size, "one_by_one": bool(notices)}
    if engine == "auto" and not strategy.client_rule.is_plain_training:  # of a strategy of one's own
        engine = "pool"
    if engine in ("compiled", "auto"):
        progress.stage("compiling the training step" if engine == "compiled" else "choosing the engine")
    chosen: str = engine
    if engine != "pool":
        request = {"kind": "engine", "model": dict(model), "engine": engine, "batch_size": batch_size}
        found = pool.run_one(request).values
        engine = chosen = found["engine"]
        if found["why"]:
            progress.note(f'simulation.engine = "{chosen}" trains as "pool" does: {found["why"]}')
            engine = "pool"
    return {"engine": engine, "chosen": chosen, "batch_size": batch_size}


def require_row_gradients(experiment: Experiment, model: Mapping[str, Any], pool: WorkerPool) -> list[str]:
    """A notice if DP-SGD is slow on the model of an experiment that asks for it, if any.

    Raises:
        UserError: the model's rows have no gradients of their own.
    """
    if experiment.privacy.mechanism != "example":
        return []
    batch_size = experiment.local.batch_size
    request = {"kind": "engine", "model": dict(model), "engine": PRIVATE_ROWS, "batch_size": batch_size}
    why = pool.run_one(request).values["why"]
    return [f"DP-SGD differentiates one row after the other: {why}"] if why else []
