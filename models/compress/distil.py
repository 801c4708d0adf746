"""Distillation: a student learns its teachers' probabilities along with the labels.

Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network", section 2: both softmaxes at
temperature T, the soft term multiplied by T^2 so that its gradients keep their size when T changes. Several
teachers speak with the mean of their probabilities (section 3).

A student of the teacher's own architecture is born again (Furlanello 2018, "Born-again neural networks"). With
`hint` the student learns what a layer of the teacher answers as well (Romero 2015, "FitNets", equation 3): a linear
regressor, learnt along and thrown away, takes a student's layer to a teacher's. The hint is a term of the one loss,
not a stage before it; its mean squared error is divided by the mean square of the teacher's answers, so that its weight means
the same for any layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from models import catalog, zoo
from models.compress.report import accuracy, parameters
from models.compress.step import Context, Data, Model, StepRefused
from models.compress.tuning import Objective, OnEpoch, Tuning, tune
from models.datasets import notation
from models.datasets.dataset import DataError
from models.labels import PADDING
from models.options import bounded
from models.pretrain.params import shapes_of
from models.zoo.spec import Loss, ModelSpec, masked_cross_entropy


@dataclass(frozen=True)
class Options(Tuning):
    """How to distil.

    Attributes:
        student: the model to distil into, as `cnn` or `cnn(channels=[4, 8])`; empty: the same architecture again.
        start: `fresh` weights, or the `current` model's, which finds back what an earlier step has cost.
        teachers: folders of trained models, separated by commas; empty: the model that the pipeline began with.
        temperature: T of both softmaxes.
        alpha: weight of the soft term; 1 - alpha that of the labels. 0 is plain training.
        hint: weight of the hint, whose size is a share of what the teacher's layer answers; 0: none.
        hint_student, hint_teacher: names of its layers; empty: the one nearest to the middle. Of several teachers the first hints.
    """

    epochs: int = bounded(30, 0, 100_000)
    lr: float = bounded(2e-3, 0.0, 1e3)
    student: str = ""
    start: Literal["fresh", "current"] = "fresh"
    teachers: str = ""
    temperature: float = bounded(3.0, 0.01, 1e3)
    alpha: float = bounded(0.7, 0.0, 1.0)
    hint: float = bounded(0.0, 0.0, 1e6)
    hint_student: str = ""
    hint_teacher: str = ""


@dataclass(frozen=True)
class Distilled:
    """A trained student, in evaluation mode, and the loss of every step."""

    student: nn.Module
    losses: list[float]


def step(model: Model, data: Data, options: Options, context: Context) -> Model:
    """The student that `options` ask for, taught by the original model or by those they name.

    Raises:
        StepRefused: teachers and student do not fit together, or there is no such layer to take hints from.
    """
    teachers = _teachers(options, context)
    spec = named(options.student, model.spec) if options.student else model.spec
    for name, teacher in teachers.items():
        _require_alike(name, teacher.spec, spec)
    student = _student(model, spec, options, context.seed)
    x, y = data.x_train, data.y_train
    if data.x_extra is not None:
        x = np.concatenate([x, data.x_extra])
        y = np.concatenate([y, np.full((len(data.x_extra), *y.shape[1:]), PADDING, np.int32)])
    modules = [teacher.module for teacher in teachers.values()]
    distilled = distil(
        modules,
        student,
        x,
        y,
        options,
        context.rng(),
        loss=spec.loss,
        on_epoch=lambda epoch, loss: context.tell({"epoch": epoch, "epochs": options.epochs, "loss": loss}),
    )
    facts = {
        "teachers": {
            name: {
                "accuracy": accuracy(teacher.module, data.x_test, data.y_test),
                "parameters": parameters(teacher.module),
            }
            for name, teacher in teachers.items()
        },
        "steps": len(distilled.losses),
        "loss": distilled.losses[-1] if distilled.losses else None,
    }
    return Model(spec, distilled.student, facts=facts)


def distil(
    teachers: Sequence[nn.Module],
    student: nn.Module,
    x: npt.NDArray[Any],
    y: npt.NDArray[np.int32],
    options: Options,
    rng: np.random.Generator,
    *,
    loss: Loss = masked_cross_entropy,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> Distilled:
    """Trains a copy of `student` on what `teachers` say about `x` and on `y`; no given module is changed.

    Args:
        y: int32 [N] or [N, T]; a row of nothing but `PADDING` is unlabelled and has only the soft term.
        loss: the student's own, mean per counted label.

    Raises:
        StepRefused: a layer to take hints from is unknown or of another kind.
    """
    learner = copy.deepcopy(student)
    taught = objective(teachers, options.temperature, options.alpha, loss)
    if not options.hint:
        losses = tune(learner, x, y, options, rng, taught, on_epoch=on_epoch)
        return Distilled(learner, losses)
    with _hinted(teachers[0], learner, x, options, int(rng.integers(2**31))) as (mismatch, regressor):

        def both(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return taught(module, x, y) + options.hint * mismatch(x)

        losses = tune(learner, x, y, options, rng, both, also=regressor.parameters(), on_epoch=on_epoch)
    return Distilled(learner, losses)


def objective(
    teachers: Sequence[nn.Module],
    temperature: float = 3.0,
    alpha: float = 0.7,
    loss: Loss = masked_cross_entropy,
) -> Objective:
    """What `tune` minimises so that its module learns from `teachers`: also to quantize or prune with distillation.

    Holds copies of the teachers.
    """
    guides = [copy.deepcopy(teacher).eval() for teacher in teachers]

    def taught(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = consensus([guide(x) for guide in guides], temperature)
        return distillation_loss(module(x), wanted, y, temperature, alpha, loss)

    return taught


def consensus(logits: Sequence[torch.Tensor], temperature: float) -> torch.Tensor:
    """Logits whose softmax at `temperature` is the mean of the softmaxes of all `logits` at it, each [B, (T,) C]."""
    if len(logits) == 1:
        return logits[0]
    each = torch.stack([F.log_softmax(one / temperature, -1) for one in logits])
    return temperature * (each.logsumexp(0) - math.log(len(logits)))


def distillation_loss(
    logits: torch.Tensor,
    taught: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    alpha: float,
    loss: Loss = masked_cross_entropy,
) -> torch.Tensor:
    """alpha · T² · KL(teacher ‖ student at T) + (1 - alpha) · loss, over logits [B, (T,) C].

    The soft term is the mean over labels that count, and over every place of unlabelled rows.
    """
    unlabelled = (y == PADDING).flatten(1).all(1) if y.ndim > 1 else y == PADDING
    heeded = (y != PADDING) | unlabelled.reshape(-1, *[1] * (y.ndim - 1))
    wanted = F.log_softmax(taught / temperature, -1)
    said = F.log_softmax(logits / temperature, -1)
    divergence = F.kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
    soft = (divergence * heeded).sum() / heeded.sum() * temperature**2
    if not (y != PADDING).any():
        return alpha * soft
    return alpha * soft + (1 - alpha) * loss(logits, y)


def named(text: str, like: ModelSpec) -> ModelSpec:
    """The model `name` or `name(option=value)` for the examples and classes of `like`.

    Raises:
        StepRefused: there is none, or not with these options.
    """
    try:
        # a user's own is package.module:build, which the notation does not read as a name
        name: str = text
        options: dict[str, Any] = {}
        if "(" in text:
            head, _, rest = text.partition("(")
            call = notation.parse(f"student({rest}")
            if call.positional:
                raise DataError(f"{text!r} has a value without a name; options are key=value")
            name, options = head.strip(), call.named
        known = catalog.MODELS.get(name)
        if known is not None and "vocab" in known.options.model_fields and "vocab" in like.options:
            options = {"vocab": like.options["vocab"], **options}
        return zoo.get(
            name,
            input_shape=like.input_shape,
            classes=like.classes,
            input_dtype=like.input_dtype,
            task=like.task,
            **options,
        )
    except ValueError as error:
        raise StepRefused(f"student = {text!r}: {error}") from error


def _teachers(options: Options, context: Context) -> Mapping[str, Model]:
    names = folders(options.teachers)
    return {name: context.teachers[name] for name in names} or {"original": context.original}


def folders(teachers: str) -> list[str]:
    """The names in an option `teachers`."""
    return [name.strip() for name in teachers.split(",") if name.strip()]


def _require_alike(name: str, teacher: ModelSpec, student: ModelSpec) -> None:
    theirs, ours = ((spec.input_shape, spec.classes) for spec in (teacher, student))
    if theirs != ours:
        raise StepRefused(
            f"teacher {name!r} takes {theirs[0]} to {theirs[1]} classes, the student {ours[0]} to {ours[1]}; "
            "they must agree"
        )


def _student(model: Model, spec: ModelSpec, options: Options, seed: int) -> nn.Module:
    if options.start == "current":
        if options.student:
            raise StepRefused(
                "start = 'current' goes on with the model as it is, and student names another one; give only one"
            )
        return model.module
    student = spec.build(seed)
    if not options.student and shapes_of(student) != shapes_of(model.module):
        raise StepRefused(
            f"model {spec.name!r} has been pruned, factorised or folded, so it cannot be born again; "
            "start = 'current' trains it as it is"
        )
    return student


@contextmanager
def _hinted(
    teacher: nn.Module, student: nn.Module, x: npt.NDArray[Any], options: Options, seed: int
) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]]:
    """How far the student's layer, as of its last forward pass, is from the teacher's on x; and the regressor between."""
    guide = copy.deepcopy(teacher).eval()
    theirs, ours = (
        _layer(guide, options.hint_teacher, "teacher"),
        _layer(student, options.hint_student, "student"),
    )
    with _answers(theirs) as wanted, _answers(ours) as said:
        rows = torch.from_numpy(x[:2])
        with torch.no_grad():
            guide(rows)
            student.eval()(rows)
        _require_tensor(wanted, options.hint_teacher, "teacher")
        _require_tensor(said, options.hint_student, "student")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            regressor = _regressor(said[0], wanted[0])

        def mismatch(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                guide(x)
            error = F.mse_loss(_sized(regressor(said[0]), wanted[0]), wanted[0])
            return error / wanted[0].square().mean().clamp(min=1e-12)

        yield mismatch, regressor


@contextmanager
def _answers(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The latest output of `layer`, the only element of the list."""
    latest: list[torch.Tensor] = []

    def keep(module: nn.Module, given: object, answer: torch.Tensor) -> None:
        latest[:] = [answer]

    handle = layer.register_forward_hook(keep)
    try:
        yield latest
    finally:
        handle.remove()


def _layer(module: nn.Module, name: str, whose: str) -> nn.Module:
    """The layer `name`; without one, of all that have weights of two axes or more the one nearest to the middle."""
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if path and any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False))
    }
    if not layers:
        raise StepRefused(f"the {whose} has no layer with weights of two axes or more to take hints from")
    if not name:
        name = list(layers)[len(layers) // 2 - (len(layers) % 2 == 0)]
    everything: dict[str, nn.Module] = dict(module.named_modules())
    if name not in everything:
        raise StepRefused(f"hint_{whose} = {name!r} is no layer of the {whose}; it has {', '.join(layers)}")
    return everything[name]


def _require_tensor(answers: list[Any], name: str, whose: str) -> None:
    """A layer may be bypassed by the one around it, which reads its weights, or answer with several tensors."""
    if not answers or not isinstance(answers[0], torch.Tensor):
        problem = "answers with no single tensor" if answers else "is not called"
        raise StepRefused(
            f"the {whose}'s layer {name or 'in the middle'} {problem}; name another one in hint_{whose}"
        )


def _regressor(said: torch.Tensor, wanted: torch.Tensor) -> nn.Module:
    """A linear map over channels: a 1x1 convolution of maps [B, C, H, W], else over the last axis."""
    if said.ndim != wanted.ndim or (said.ndim != 4 and said.shape[:-1] != wanted.shape[:-1]):
        raise StepRefused(
            f"the student's layer answers {tuple(said.shape[1:])} a row and the teacher's {tuple(wanted.shape[1:])}; "
            "name layers of one kind in hint_student and hint_teacher"
        )
    if said.ndim == 4:
        return nn.Conv2d(said.shape[1], wanted.shape[1], 1)
    return nn.Linear(said.shape[-1], wanted.shape[-1])


def _sized(said: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Maps pooled, or repeated, to the extent of the teacher's."""
    return F.adaptive_avg_pool2d(said, (wanted.shape[-2], wanted.shape[-1])) if said.ndim == 4 else said
