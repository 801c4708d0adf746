"""The configuration of a pretraining: one TOML document, validated before anything starts.

`load(path, sets, plan)` reads the file, applies `--set` and `--plan`, fills in defaults, and reports
every bad value at once. The result is complete: stored (`to_toml`), it documents the whole training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coordinator.datacenter import documents
from coordinator.datacenter.training_data import (
    LEARNT,
    TEXT,
    TOKENS,
    StartModel,
    TrainingData,
    find_data_problems,
    find_tokenizer,
    names_tokenizer,
)
from coordinator.document_checks import Section, to_user_error, validate
from coordinator.errors import UserError
from coordinator.experiments.defaults import complete_options, data_name, missing, table_defaults
from coordinator.experiments.experiment import (
    apply_settings,
    read_document,
    require_name,
    with_published_model,
)
from coordinator.experiments.validation import dataset_name_problem, find_model_problems
from coordinator.json_values import flatten
from coordinator.toml_files import absolute
from models import adaptation, options
from models.pretrain import plan as plans
from models.pretrain.parameter_server.settings import Servers
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.planner import scaling
from models.pretrain.training import ProfileOptions, TrainingOptions, validation_rows


class Checkpoint(Section):
    """`every`: steps between two checkpoints, 0 for none; `keep`: how many of the latest remain; `keep_every`: steps to keep besides.

    `keep_best` keeps the one with the lowest validation loss as well; `result` says whether the training ends with that model or the last.
    """

    every: Annotated[int, Field(ge=0, le=100_000_000)] = 50
    keep: Annotated[int, Field(ge=1, le=1_000_000)] = 2
    keep_every: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    keep_best: bool = False
    result: Literal["last", "best"] = "last"
    background: bool = True


class PretrainingData(TrainingData):
    """`validation_rows`: rows of the training set to hold out and score during the training; 0: a tenth, at most 1024."""

    validation_rows: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0


class PretrainingModel(StartModel):
    """`adapt` trains only few params on top of `init`: head, lora(rank) or lora(rank, alpha), as in an experiment.

    `init` may also be the folder of a pretraining.
    """

    adapt: str | None = None


class Scaling(Section):
    """The batch size that `[train]` was chosen for, and the rule for another one (`models.pretrain.planner.scaling`)."""

    base_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    rule: Literal["linear", "sqrt"] | None = None


class Pretraining(Section):
    name: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    data: PretrainingData = PretrainingData()
    model: PretrainingModel = PretrainingModel()
    train: dict[str, Any] = Field(default_factory=dict)
    scaling: Scaling | None = None
    plan: dict[str, Any] = Field(default_factory=dict)
    checkpoint: Checkpoint = Checkpoint()
    profile: dict[str, Any] | None = None
    hang_seconds: Annotated[int, Field(ge=1, le=86_400)] = 300
    server: dict[str, Any] | None = None

    @property
    def parallel_plan(self) -> ParallelPlan:
        return plans.from_table(self.plan)

    @property
    def fixed_plan(self) -> dict[str, Any]:
        """The keys of `[plan]` that the planner keeps: all but degrees of 1, which are what a plan has without being asked."""
        return {key: value for key, value in self.plan.items() if value != 1 or key not in plans.DEGREES}

    def train_rows(self, data: Mapping[str, Any]) -> int:
        """Rows of the loaded `data` that steps train on."""
        rows: int = data["rows"]["train"]
        validates = self.train.get("validate_every", 0) > 0
        return rows - validation_rows(self.data.validation_rows, rows) if validates else rows

    def options(self, train_rows: int) -> TrainingOptions:
        """The training options for so many rows: `[train]` after `[scaling]`."""
        training = options.read(TrainingOptions, self.train, "train")
        if self.scaling is None:
            return training
        rule = self.scaling.rule or scaling.rule_for(training.optimizer)
        return scaling.scaled(
            training, self.scaling.base_batch_size, rule, -(-train_rows // training.batch_size)
        )


# Defaults by data set.
_MODELS = {
    "digits": "cnn",
    "mnist": "cnn",
    "shakespeare": "gpt",
    TEXT: "gpt",
    TOKENS: "gpt",
    "phrasebank": "textcls",
}
_TEXT: Mapping[str, Mapping[str, int]] = {
    "shakespeare": {"length": 64},
    TEXT: {"length": 64},
    TOKENS: {"length": 64},
    "phrasebank": {"length": 32, "vocab": 2048},
}
_LANGUAGE = {"steps": 400, "batch_size": 32, "lr": 2e-3, "warmup": 20, "decay": "cosine"}
_TRAIN: Mapping[str, Mapping[str, Any]] = {
    "shakespeare": _LANGUAGE,
    TEXT: _LANGUAGE,
    TOKENS: _LANGUAGE,
    "phrasebank": {"epochs": 8, "batch_size": 32, "lr": 2e-3},
}
_OTHER_TRAIN = {"epochs": 20, "batch_size": 32, "lr": 2e-3}
_AFFECTS = {"data.dataset": ("data", "model"), "model.name": ("model",)}
"""Key -> tables whose defaults or meaning depend on it."""

MUTABLE = (
    "plan",
    "checkpoint",
    "hang_seconds",
    *(
        f"train.{key}"
        for key in (
            "steps", "epochs", "lr", "weight_decay", "no_decay", "momentum", "beta1", "beta2", "eps", "warmup", "decay",
            "clip_norm", "outer_lr", "outer_momentum", "freeze_cache_mib",
        )
    ),
)  # fmt: skip
"""Settings that may change when a pretraining is resumed; not those that determine the batches of steps or the contents of checkpoints."""


def load(
    path: Path | None, sets: Sequence[str] = (), plan: str = "", *, profile: bool = False
) -> Pretraining:
    """The pretraining in a file (or all defaults) after `--set key=value` settings, `--plan` and `--profile`.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    document = with_architecture(read_document(path, sets))
    if profile:
        document = {"profile": {}} | dict(document)
    return resolve(document, str(path) if path else "pretraining", plan)


def load_with(path: Path | None, sets: Sequence[str], table: str) -> tuple[Pretraining, dict[str, Any]]:
    """The pretraining as `load`, without the command's own `table` in its file and settings, and that table.

    Raises:
        UserError: as `load`.
    """
    document = with_architecture(read_document(path, sets))
    own = document.pop(table, {})
    return resolve(document, str(path) if path else "pretraining"), own


def with_architecture(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with the model of the folder that `model.init` names, if it names one: of a pretraining, whose params
    become `model.init`, or in Hugging Face's layout. A text is encoded by its tokenizer.

    Keys of the document go before those of the folder.

    Raises:
        UserError: the folder's description is damaged, or describes a model that ours cannot be.
    """
    model = document.get("model")
    init = model.get("init") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(init, str):
        return dict(document)
    folder = Path(absolute(init))
    document = _with_tokenizer(document, folder)
    if (folder / documents.MODEL).is_file():
        described = documents.read_document(folder / documents.MODEL, "name", "options")
        require_name(model, init, described["name"])
        own = {
            **described["options"],
            "name": described["name"],
            **model,
            "init": str(folder / documents.PARAMS),
        }
        return {**document, "model": own}
    return with_published_model(document)


def _with_tokenizer(document: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The document, whose text is encoded by the tokenizer of the model in `folder`, if it has one and no encoding is named."""
    data = document.get("data")
    found = find_tokenizer(folder)
    if found is None or not isinstance(data, dict) or data.get("dataset") not in LEARNT:
        return document
    return {**document, "data": {"encoding": str(found), **data}}


def resolve(document: Mapping[str, Any], source: str, plan: str = "") -> Pretraining:
    """A valid pretraining with every default filled in; `plan` is "key=value,…" and overrides `[plan]`.

    Raises:
        UserError: listing every problem at once; `source` names the document in messages.
    """
    config, problems = validate(Pretraining, document, lambda config: _problems(config, plan), _AFFECTS)
    if config is None or problems:
        raise to_user_error(source, problems)
    return _complete(config, plans.parse(plan, config.plan))


def change(
    document: Mapping[str, Any], source: str, sets: Sequence[str], plan: str
) -> tuple[Pretraining, list[str]]:
    """The configuration in `document` after `--set` and `--plan`, and a line for each change.

    A non-empty `plan` replaces the whole `[plan]`, which lists every degree.

    Raises:
        UserError: naming every setting that may not change.
    """
    before = resolve(document, source)
    requested = apply_settings(before.model_dump(exclude_none=True), sets)
    if (
        requested["train"]["epochs"] != before.train["epochs"]
        and requested["train"]["steps"] == before.train["steps"]
    ):
        requested["train"]["steps"] = 0  # epochs apply if steps is 0
    after = resolve(requested | ({"plan": {}} if plan else {}), source, plan)
    old, new = (flatten(each.model_dump(mode="json")) for each in (before, after))
    plans = [str(each.parallel_plan) for each in (before, after)]
    differing = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    refused = [key for key in differing if key not in MUTABLE and key.partition(".")[0] not in MUTABLE]
    if refused:
        raise UserError(
            "\n  ".join(
                [f"{source}: cannot change when a pretraining is resumed:"]
                + [f"{key} was {old.get(key)!r}, requested is {new.get(key)!r}" for key in refused]
                + [f"settings that can: {', '.join(MUTABLE)}; for all others, start again with another --out"]
            )
        )
    lines = [
        f"{key}: {old.get(key)} -> {new.get(key)}" for key in differing if key.partition(".")[0] != "plan"
    ]
    return after, [*lines, *([f"plan: {plans[0]} -> {plans[1]}"] if plans[0] != plans[1] else [])]


def _problems(config: Pretraining, plan: str) -> Iterator[str]:
    """Problems that involve several keys; `plan` is the command's option."""
    if plan and config.server is not None:
        yield "--plan cannot be combined with [server]"
    try:
        plans.parse(plan, config.plan)
    except PlanError as error:
        yield str(error)
    data = config.data
    if data.dataset not in (TEXT, TOKENS) and (problem := dataset_name_problem(data.dataset)):
        yield f"data.dataset: {problem}; for your own text file use {TEXT!r}, for token files {TOKENS!r}, with data.path"
    if data.dataset in ("csv", "npz", TEXT) and data.path is None:
        yield f"data.dataset = {data.dataset!r} needs data.path, the file to read"
    if data.dataset == TOKENS and data.path is None:
        yield "data.dataset = 'tokens' needs data.path, the folder that fedloop pretrain tokenize made"
    if data.public_samples and data.dataset in ("shakespeare", TEXT, TOKENS):
        yield f"data.public_samples = {data.public_samples} is for data sets of rows, but data.dataset = {data.dataset!r} is one text"
    yield from find_data_problems(data)
    yield from find_model_problems(_model_name(config), config.model.options)
    if config.model.head is not None and config.model.init is None:
        yield "model.head selects what to use of model.init, which is missing"
    yield from _adapt_problems(config)
    yield from options.problems(TrainingOptions, config.train, "train")
    yield from _validation_problems(config)
    if config.profile is not None:
        yield from options.problems(ProfileOptions, config.profile, "profile")
    if config.server is not None:
        if config.profile is not None:
            yield "server and profile are both given; a profile needs a plan, and a parameter server has none"
        wrong_server = options.problems(Servers, config.server, "server")
        yield from wrong_server
        if not wrong_server and not options.problems(TrainingOptions, config.train, "train"):
            train = options.read(TrainingOptions, config.train, "train")
            servers = options.read(Servers, config.server, "server")
            yield from (
                f"server: {problem}" for problem in servers.problems(train.batch_size, train.clip_norm)
            )
        if config.plan:
            yield "server and plan are both given; the workers of a parameter server share the batch"


def _adapt_problems(config: Pretraining) -> Iterator[str]:
    how = config.model.adapt
    if how is None:
        return
    yield from adaptation.problems(how, config.model.init)
    if config.server is not None:
        yield f"model.adapt = {how!r} needs a plan; a parameter server trains all params"


def _validation_problems(config: Pretraining) -> Iterator[str]:
    validates, checkpoint = config.train.get("validate_every", 0), config.checkpoint
    if not validates and config.data.validation_rows:
        yield f"data.validation_rows = {config.data.validation_rows} needs train.validate_every, the steps between two scores"
    if validates and config.server is not None:
        yield "train.validate_every needs a plan; a parameter server has no model at hand to score"
    if not checkpoint.keep_best:
        if checkpoint.result == "best":
            yield 'checkpoint.result = "best" needs checkpoint.keep_best = true'
    elif not validates:
        yield "checkpoint.keep_best needs train.validate_every: the best has the lowest validation loss"
    elif not checkpoint.every:
        yield "checkpoint.keep_best needs checkpoint.every of 1 or more: with 0 nothing is saved"


def _complete(config: Pretraining, plan: ParallelPlan) -> Pretraining:
    data, name = config.data, _model_name(config)
    text = missing(data, {**_TEXT.get(data.dataset, {}), **table_defaults(data.dataset)})
    if data.path is not None:
        text["path"] = absolute(data.path)
    if data.dataset == TEXT and data.encoding is None:
        text["encoding"] = "characters"
    if data.dataset in LEARNT and names_tokenizer(data.encoding or ""):
        text["encoding"] = absolute(data.encoding or "")
    if data.dataset == TOKENS and data.packing is None:
        text["packing"] = "concatenate"
    data = data.model_copy(update=text)
    model_options = complete_options(name, config.model.options, data.vocab)
    init = {"init": absolute(config.model.init)} if config.model.init else {}
    kept = {"head": config.model.head, "adapt": config.model.adapt}
    model = PretrainingModel.model_validate({"name": name, **init, **kept, **model_options})
    defaults = _TRAIN.get(data.dataset, _OTHER_TRAIN)
    if "epochs" in config.train:
        defaults = {key: value for key, value in defaults.items() if key != "steps"}
    train = dataclasses.asdict(options.read(TrainingOptions, {**defaults, **config.train}, "train"))
    return config.model_copy(
        update={
            "name": config.name or data_name(data.dataset, data.path),
            "data": data,
            "model": model,
            "train": train,
            "plan": {} if config.server is not None else _table(plan),
        }
    )


def _model_name(config: Pretraining) -> str:
    return config.model.name or _MODELS.get(config.data.dataset, "mlp")


def _table(plan: ParallelPlan) -> dict[str, Any]:
    """The degrees, and all other values that differ from the default."""
    always = {"dp", "tp", "pp"}
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(plan)
        if (value := getattr(plan, field.name)) != field.default or field.name in always
    }
