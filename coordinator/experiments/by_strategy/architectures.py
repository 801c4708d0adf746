"""Device classes of a federation under FedDF: which model each trains, and what goes with them.

    [model]
    name = "cnn"

    [strategy]
    name = "feddf"
    classes = { gateway = "cnn", phone = { name = "mlp", hidden = [32] }, watch = "logreg" }

A class that names the model of the run, without options of its own, has that very model. Without classes all clients have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from models import adaptation, catalog, user_code, widths
from strategies.suggestions import suggest

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment

STRATEGY = "feddf"


def are_used(experiment: Experiment) -> bool:
    """Whether the clients of a run train models of different architectures."""
    return experiment.strategy.name == STRATEGY and bool(experiment.strategy.options.get("classes"))


def classes_of(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """`name` and `options` of the model of each class, those that need the most memory first; empty if all clients train the same.

    Raises:
        ValidationError: an option of a model is wrong.
    """
    if not are_used(experiment):
        return {}
    given: Mapping[str, Any] = experiment.strategy.options["classes"]
    least: Mapping[str, float] = experiment.strategy.options["memory_mib"]
    ordered = sorted(given, key=lambda label: -least.get(label, 0.0))
    return {label: _model_of(experiment, given[label]) for label in ordered}


def run_class(experiment: Experiment, classes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The class that has the run's own model; None if no class has it."""
    own = {"name": experiment.model.name, "options": experiment.model.options}
    return next((label for label, model in classes.items() if dict(model) == own), None)


def _model_of(experiment: Experiment, given: str | Mapping[str, Any]) -> dict[str, Any]:
    table = {"name": given} if isinstance(given, str) else dict(given)
    name, options = table.pop("name"), table
    if name == experiment.model.name and not options:
        return {"name": name, "options": experiment.model.options}
    entry = catalog.MODELS.get(name)
    if entry is None:
        return {"name": name, "options": options}
    words = {"vocab": experiment.data.vocab} if experiment.data.vocab is not None else {}
    known = {key: value for key, value in words.items() if key in entry.options.model_fields}
    return {"name": name, "options": entry.options.model_validate({**known, **options}).model_dump()}


def find_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each problem of `strategy.classes` and of a model that learns from others."""
    if experiment.strategy.name != STRATEGY:
        return
    key = f"strategy.name = {STRATEGY!r}"
    if experiment.data.task in ("regression", "next_token"):
        yield f'data.task = "{experiment.data.task}" does not go with {key}, which averages what models answer for classes'
    if experiment.model.adapt is not None:
        yield f"model.adapt = {experiment.model.adapt!r} freezes a backbone, and {key} distils whole models; leave one of them out"
    if (experiment.model.name or "").endswith(user_code.KERAS_FILE):
        yield f"model.name = {experiment.model.name!r} is a Keras model, and {key} distils PyTorch models; take another one"
    if not are_used(experiment):
        for option in ("shares", "memory_mib"):
            if experiment.strategy.options[option]:
                yield f"strategy.{option} is about classes; give strategy.classes too, or leave it out"
        return
    try:
        classes = classes_of(experiment)
    except ValidationError:
        yield from _option_problems(experiment)
        return
    yield from _class_problems(experiment, classes)
    if experiment.federation.keep == "best":
        yield f'federation.keep = "best" keeps the run\'s own model of the best round, and {key} has several; leave it out'


def _option_problems(experiment: Experiment) -> Iterator[str]:
    """The wrong options of models of classes."""
    for label, given in experiment.strategy.options["classes"].items():
        try:
            _model_of(experiment, given)
        except ValidationError as error:
            name = given if isinstance(given, str) else given["name"]
            for item in error.errors():
                where = ".".join(str(part) for part in item["loc"])
                yield f"strategy.classes: {label} has {where} = {item['input']!r} for model {name!r}: {item['msg']}"


def _class_problems(experiment: Experiment, classes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if run_class(experiment, classes) is None:
        yield (
            f"strategy.classes: no class has the model of the run, model.name = {experiment.model.name!r}, which is the one to release; "
            f'give it to one, such as {next(iter(classes))} = "{experiment.model.name}"'
        )
    seen: dict[str, str] = {}
    for label, model in classes.items():
        name = model["name"]
        if (other := seen.setdefault(str(dict(model)), label)) != label:
            yield f"strategy.classes: {other} and {label} train the same model; leave one out"
        if name.endswith(user_code.KERAS_FILE):
            yield f"strategy.classes: {label} = {name!r} is a Keras model, and FedDF distils PyTorch models; take another one"
        elif name in (adaptation.MODEL, widths.MODEL) or (
            name not in catalog.MODELS and not user_code.is_reference(name)
        ):
            yield (
                f"strategy.classes: model {name!r} of {label} is unknown{suggest(name, catalog.MODELS)}; known: "
                f"{', '.join(catalog.MODELS)}; your own is given as package.module:build"
            )
        elif (entry := catalog.MODELS.get(name)) is not None:
            for runtime in experiment.federation.runtimes:
                if runtime not in entry.runtimes:
                    yield (
                        f"federation.runtimes asks for {runtime}, but {name!r}, the model of {label} in strategy.classes, runs in: "
                        f"{', '.join(entry.runtimes)}"
                    )
