"""The configuration of a pretraining: one TOML document, checked as a whole before anything starts.

`load(path, sets, plan)` reads the file, applies `--set` and `--plan`, fills in what goes without saying, and reports
every bad value at once. The result is complete: written down (`to_toml`) it records the whole training.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.experiment import Section, changed, name_problem, read
from coordinator.sections import described, model_problems, wrong
from models import catalog, options
from models.pretrain import plan as plans
from models.pretrain.plan import ParallelPlan, PlanError
from models.pretrain.planner import scaling
from models.pretrain.server.settings import Servers
from models.pretrain.training import Options, Profile

TEST_ROWS = 1000
TEXT = "text"
"""The data set that is a text file of the user's own."""

_ENCODING = r"^(characters|bytes|bpe\(\d+\))$"


class Data(Section):
    """What to train on. `encoding`: of a text's tokens, `characters`, `bytes` or `bpe(n)`. `test_rows`: at most so many of the held-out rows are scored; 0: all.
    `public_samples`: train on so many rows only, those that an experiment of the same seed and number keeps from its clients; 0: all."""

    dataset: str = "digits"
    path: str | None = None
    label: str | None = None
    split: str | None = None
    features: list[str] | None = None
    length: Annotated[int, Field(ge=1, le=65536)] | None = None
    vocab: Annotated[int, Field(ge=3, le=1_000_000)] | None = None
    encoding: Annotated[str, Field(pattern=_ENCODING)] | None = None
    test_rows: Annotated[int, Field(ge=0)] = TEST_ROWS
    public_samples: Annotated[int, Field(ge=0)] = 0


class Model(BaseModel):
    """`name`, and params to begin with; every other key is an option of the model.

    `init` is a `.safetensors` file, `head` whether its last module is taken too.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    name: str | None = None
    init: str | None = None
    head: Literal["same", "new"] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Checkpoint(Section):
    """Steps between two checkpoints, 0 for none; how many of the latest stay, and which besides."""

    every: Annotated[int, Field(ge=0, le=100_000_000)] = 50
    keep: Annotated[int, Field(ge=1, le=1_000_000)] = 2
    keep_every: Annotated[int, Field(ge=0, le=100_000_000)] = 0
    background: bool = True


class Scaling(Section):
    """The batch that `[train]` is right for, and how its options follow another (`models.pretrain.planner.scaling`)."""

    base_batch_size: Annotated[int, Field(ge=1, le=1_000_000)]
    rule: Literal["linear", "sqrt"] | None = None


class Pretraining(Section):
    name: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 7
    data: Data = Data()
    model: Model = Model()
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

    def options(self, train_rows: int) -> Options:
        """How to train on so many rows: `[train]`, after `[scaling]`."""
        given = options.read(Options, self.train, "train")
        if self.scaling is None:
            return given
        rule = self.scaling.rule or scaling.suited(given.optimizer)
        return scaling.scaled(given, self.scaling.base_batch_size, rule, -(-train_rows // given.batch_size))

    def to_toml(self) -> str:
        """The configuration as a TOML document; keys without a value are left out."""
        return tomlkit.dumps(self.model_dump(mode="json", exclude_none=True))


# What goes without saying, by data set.
_MODELS = {"digits": "cnn", "mnist": "cnn", "shakespeare": "gpt", TEXT: "gpt", "phrasebank": "textcls"}
_TEXT: Mapping[str, Mapping[str, int]] = {
    "shakespeare": {"length": 64},
    TEXT: {"length": 64},
    "phrasebank": {"length": 32, "vocab": 2048},
}
_LANGUAGE = {"steps": 400, "batch_size": 32, "lr": 2e-3, "warmup": 20, "decay": "cosine"}
_TRAIN: Mapping[str, Mapping[str, Any]] = {
    "shakespeare": _LANGUAGE,
    TEXT: _LANGUAGE,
    "phrasebank": {"epochs": 8, "batch_size": 32, "lr": 2e-3},
}
_OTHER_TRAIN = {"epochs": 20, "batch_size": 32, "lr": 2e-3}
_OWN_KEYS: Mapping[str, tuple[str, ...]] = {
    "path": ("csv", TEXT),
    "label": ("csv",),
    "split": ("csv",),
    "features": ("csv",),
    "length": ("shakespeare", "phrasebank", TEXT),
    "encoding": ("shakespeare", TEXT),
    "vocab": ("phrasebank",),
}


def load(
    path: Path | None, sets: Sequence[str] = (), plan: str = "", *, profile: bool = False
) -> Pretraining:
    """The pretraining of a file (or all defaults) after `--set key=value` settings, `--plan` and `--profile`.

    Raises:
        UserError: naming the file, every bad key with its value, and what was expected.
    """
    document = changed(read(path) if path else {}, sets)
    if profile:
        document = {"profile": {}} | dict(document)
    return resolve(document, str(path) if path else "pretraining", plan)


def resolve(document: Mapping[str, Any], source: str, plan: str = "") -> Pretraining:
    """A checked pretraining with every default filled in; `plan` is "key=value,…" over its `[plan]`.

    Raises:
        UserError: listing every problem at once; `source` is what the messages call the document.
    """
    try:
        asked = Pretraining.model_validate(document)
    except ValidationError as error:
        raise wrong(source, [described(item, Pretraining) for item in error.errors()]) from None
    problems = list(_problems(asked))
    if plan and asked.server is not None:
        problems.append("--plan goes without [server]")
    try:
        parallel = plans.parse(plan, asked.plan)
    except PlanError as error:
        problems.append(str(error))
    if problems:
        raise wrong(source, problems)
    return _complete(asked, parallel)


def _problems(asked: Pretraining) -> Iterator[str]:
    """What no single key's type can tell."""
    data = asked.data
    if data.dataset != TEXT and (problem := name_problem(data.dataset)):
        yield f"data.dataset: {problem}; a text file of your own is {TEXT!r} with data.path"
    if data.dataset in ("csv", TEXT) and data.path is None:
        yield f"data.dataset = {data.dataset!r} needs data.path, the file to read"
    if data.public_samples and data.dataset in ("shakespeare", TEXT):
        yield f"data.public_samples = {data.public_samples} is for data sets of rows, but data.dataset = {data.dataset!r} is one text"
    for key, datasets in _OWN_KEYS.items():
        if getattr(data, key) is not None and data.dataset not in datasets:
            yield f"data.{key} = {getattr(data, key)!r} is for {' and '.join(datasets)}, but data.dataset = {data.dataset!r}"
    yield from model_problems(_model_name(asked), asked.model.options)
    if asked.model.head is not None and asked.model.init is None:
        yield "model.head says what to take of model.init, which is not given"
    yield from options.problems(Options, asked.train, "train")
    if asked.profile is not None:
        yield from options.problems(Profile, asked.profile, "profile")
    if asked.server is not None:
        if asked.profile is not None:
            yield "server and profile are both given; profiles are of plans, which a parameter server has none of"
        wrong_server = options.problems(Servers, asked.server, "server")
        yield from wrong_server
        if not wrong_server and not options.problems(Options, asked.train, "train"):
            train = options.read(Options, asked.train, "train")
            servers = options.read(Servers, asked.server, "server")
            yield from (
                f"server: {problem}" for problem in servers.problems(train.batch_size, train.clip_norm)
            )
        if asked.plan:
            yield "server and plan are both given; a parameter server's workers share the batch among themselves"


def _complete(asked: Pretraining, plan: ParallelPlan) -> Pretraining:
    data, name = asked.data, _model_name(asked)
    text: dict[str, Any] = {k: v for k, v in _TEXT.get(data.dataset, {}).items() if getattr(data, k) is None}
    if data.path is not None:
        text["path"] = str(Path(data.path).expanduser().absolute())
    if data.dataset == TEXT and data.encoding is None:
        text["encoding"] = "characters"
    data = data.model_copy(update=text)
    entry = catalog.MODELS.get(name)
    given = asked.model.options
    if entry is not None:
        if "vocab" in entry.options.model_fields and data.vocab is not None:
            given = {"vocab": data.vocab, **given}
        given = entry.options.model_validate(given).model_dump()
    init = {"init": str(Path(asked.model.init).expanduser().absolute())} if asked.model.init else {}
    model = Model.model_validate({"name": name, **init, "head": asked.model.head, **given})
    defaults = _TRAIN.get(data.dataset, _OTHER_TRAIN)
    if "epochs" in asked.train:
        defaults = {key: value for key, value in defaults.items() if key != "steps"}
    train = dataclasses.asdict(options.read(Options, {**defaults, **asked.train}, "train"))
    return asked.model_copy(
        update={
            "name": asked.name or _default_name(data),
            "data": data,
            "model": model,
            "train": train,
            "plan": {} if asked.server is not None else _table(plan),
        }
    )


def _model_name(asked: Pretraining) -> str:
    return asked.model.name or _MODELS.get(asked.data.dataset, "mlp")


def _table(plan: ParallelPlan) -> dict[str, Any]:
    """The degrees, and what else differs from the default."""
    always = {"dp", "tp", "pp"}
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(plan)
        if (value := getattr(plan, field.name)) != field.default or field.name in always
    }


def _default_name(data: Data) -> str:
    return Path(data.path).stem if data.path is not None else re.split(r"\W", data.dataset, maxsplit=1)[0]
