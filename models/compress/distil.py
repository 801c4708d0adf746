"""Distillation: a student learns its teachers' probabilities along with the labels.

Hinton, Vinyals, Dean 2015, "Distilling the knowledge in a neural network", section 2: both softmaxes at
temperature T, the soft term multiplied by T^2 so that its gradients keep their size when T changes. With several
teachers, the mean of their probabilities is used (section 3).

A student may have the teacher's own architecture (Furlanello 2018, "Born-again neural networks"). With
`hint` the student also learns the output of a layer of the teacher (Romero 2015, "FitNets", equation 3): a linear
regressor, trained too and then discarded, maps a student's layer to a teacher's. The hint is a term of the one loss,
not a stage before it; its mean squared error is divided by the mean square of the teacher's output, so that its weight means
the same for any layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from models import catalog, zoo
from models.compress.report import parameters, quality
from models.compress.step import Context, Data, OnEpoch, StepModel, StepRefused
from models.compress.tuning import Objective, Tuning, tune
from models.datasets import notation
from models.datasets.dataset import DataError
from models.labels import are_quantities, counting, filling
from models.options import bounded
from models.pretrain.data.batches import Arrays
from models.pretrain.params import shapes_of
from models.tasks import TASKS
from models.zoo.spec import Loss, ModelSpec, masked_cross_entropy, squared_error


@dataclass(frozen=True)
class DistilOptions(Tuning):
    """Options of the distillation.

    Attributes:
        student: the model to distil into, such as `cnn` or `cnn(channels=[4, 8])`; empty: the same architecture.
        start: `fresh` weights, or those of the `current` model, which recovers accuracy lost in an earlier step.
        teachers: folders of trained models, separated by commas; empty: the source of the pipeline.
        temperature: T of both softmaxes; models that predict a quantity have none.
        alpha: weight of the soft term; 1 - alpha is that of the labels. 0 is ordinary training.
        hint: weight of the hint, whose error is relative to the teacher's output; 0: none.
        hint_student, hint_teacher: names of the layers; empty: the one nearest to the middle. With several teachers, the first gives hints.
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


def step(model: StepModel, data: Data, options: DistilOptions, context: Context) -> StepModel:
    """The student in `options`, trained by the original model or by the named teachers.

    Raises:
        StepRefused: teachers and student have different shapes, or a hint layer does not exist.
    """
    teachers = _teachers(options, context)
    spec = parse_model(options.student, model.spec) if options.student else model.spec
    for name, teacher in teachers.items():
        _require_same_shapes(name, teacher.spec, spec)
    student = _student(model, spec, options, context.seed)
    x, y = data.x_train, data.y_train
    if data.x_extra is not None:
        x = np.concatenate([x, data.x_extra])
        y = np.concatenate([y, np.full((len(data.x_extra), *y.shape[1:]), filling(y), y.dtype)])
    modules = [teacher.module for teacher in teachers.values()]
    student, losses = distil(
        modules,
        student,
        x,
        y,
        options,
        context.rng(),
        loss=spec.loss,
        on_epoch=context.report_epochs(epochs=options.epochs),
    )
    facts = {
        "teachers": {
            name: {
                TASKS[spec.task].figure: quality(teacher.module, data.x_test, data.y_test),
                "parameters": parameters(teacher.module),
            }
            for name, teacher in teachers.items()
        },
        "steps": len(losses),
        "loss": losses[-1] if losses else None,
    }
    return StepModel(spec, student, facts=facts)


def distil(
    teachers: Sequence[nn.Module],
    student: nn.Module,
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    options: DistilOptions,
    rng: np.random.Generator,
    *,
    loss: Loss = masked_cross_entropy,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> tuple[nn.Module, list[float]]:
    """A copy of `student` trained on the logits of `teachers` for `x` and on `y`, in evaluation mode, and the loss of every step.

    Args:
        y: int32 [N] or [N, T]; or quantities [N]; a row of labels that do not count has only the soft term.
        loss: the student's own, mean per counted label.

    Raises:
        StepRefused: a hint layer is unknown or of another kind.
    """
    learner, rows = copy.deepcopy(student), Arrays(x, y)
    soft_loss = objective(teachers, options.temperature, options.alpha, loss)
    if not options.hint:
        return learner, tune(learner, rows, options, rng, soft_loss, on_epoch=on_epoch)
    with _hint_loss(teachers[0], learner, x, options, int(rng.integers(2**31))) as (mismatch, regressor):

        def with_hint(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return soft_loss(module, x, y) + options.hint * mismatch(x)

        losses = tune(
            learner, rows, options, rng, with_hint, extra_parameters=regressor.parameters(), on_epoch=on_epoch
        )
    return learner, losses


def objective(
    teachers: Sequence[nn.Module],
    temperature: float = 3.0,
    alpha: float = 0.7,
    loss: Loss = masked_cross_entropy,
) -> Objective:
    """An objective for `tune` that distils `teachers`, also while quantizing or pruning. Holds copies of the teachers."""
    frozen = [copy.deepcopy(teacher).eval() for teacher in teachers]

    def loss_from_teachers(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            answers = [teacher(x) for teacher in frozen]
            mean_of = mean_answer if are_quantities(y) else partial(consensus, temperature=temperature)
            teacher_logits = mean_of(answers)
        return distillation_loss(module(x), teacher_logits, y, temperature, alpha, loss)

    return loss_from_teachers


def consensus(logits: Sequence[torch.Tensor], temperature: float) -> torch.Tensor:
    """Logits whose softmax at `temperature` is the mean of those of all `logits`, each [B, (T,) C]."""
    if len(logits) == 1:
        return logits[0]
    each = torch.stack([F.log_softmax(one / temperature, -1) for one in logits])
    return temperature * (each.logsumexp(0) - math.log(len(logits)))


def mean_answer(answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of quantities [B, 1] that several teachers predict."""
    return torch.stack(list(answers)).mean(0)


def distillation_loss(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    y: torch.Tensor,
    temperature: float,
    alpha: float,
    loss: Loss = masked_cross_entropy,
) -> torch.Tensor:
    """alpha · T² · KL(teacher ‖ student at T) + (1 - alpha) · loss, over logits [B, (T,) C].

    The soft term is the mean over labels that count, and over every position of unlabelled rows. Of quantities it is the squared
    difference between the student's and the teacher's (Chen 2017, "Learning efficient object detection models with knowledge
    distillation", section 3.3, without its bound), and T has no part in it.
    """
    labelled: torch.Tensor = counting(y)
    if are_quantities(y):
        soft = squared_error(logits, teacher_logits.squeeze(-1))
    else:
        unlabelled = ~labelled.flatten(1).any(1) if y.ndim > 1 else ~labelled
        counted = labelled | unlabelled.reshape(-1, *[1] * (y.ndim - 1))
        target = F.log_softmax(teacher_logits / temperature, -1)
        student = F.log_softmax(logits / temperature, -1)
        divergence = F.kl_div(student, target, reduction="none", log_target=True).sum(-1)
        soft = (divergence * counted).sum() / counted.sum() * temperature**2
    if not labelled.any():
        return alpha * soft
    return alpha * soft + (1 - alpha) * loss(logits, y)


def parse_model(text: str, like: ModelSpec) -> ModelSpec:
    """The model `name` or `name(option=value)` for the examples and classes of `like`.

    Raises:
        StepRefused: the model or an option is unknown.
    """
    try:
        # a user's own model is package.module:build, which the notation does not accept as a name
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


def _teachers(options: DistilOptions, context: Context) -> Mapping[str, StepModel]:
    names = [name.strip() for name in options.teachers.split(",") if name.strip()]
    return {name: context.teachers[name] for name in names} or {"original": context.original}


def _require_same_shapes(name: str, teacher: ModelSpec, student: ModelSpec) -> None:
    theirs, ours = ((spec.input_shape, spec.classes) for spec in (teacher, student))
    if theirs != ours:
        raise StepRefused(
            f"teacher {name!r} takes {theirs[0]} to {theirs[1]} classes, the student {ours[0]} to {ours[1]}; "
            "they must agree"
        )


def _student(model: StepModel, spec: ModelSpec, options: DistilOptions, seed: int) -> nn.Module:
    if options.start == "current":
        if options.student:
            raise StepRefused(
                "start = 'current' trains the current model, but student names another one; give only one"
            )
        return model.module
    student = spec.build(seed)
    if not options.student and shapes_of(student) != shapes_of(model.module):
        raise StepRefused(
            f"model {spec.name!r} has been pruned, factorised or folded, so it cannot start from fresh weights; "
            "start = 'current' trains it as it is"
        )
    return student


@contextmanager
def _hint_loss(
    teacher: nn.Module, student: nn.Module, x: npt.NDArray[Any], options: DistilOptions, seed: int
) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]]:
    """A function of x: the error between the layers' outputs, the student's from its last forward pass; and the regressor."""
    frozen = copy.deepcopy(teacher).eval()
    teacher_layer = _layer(frozen, options.hint_teacher, "teacher")
    student_layer = _layer(student, options.hint_student, "student")
    with _captured_output(teacher_layer) as target, _captured_output(student_layer) as output:
        rows = torch.from_numpy(x[:2])
        with torch.no_grad():
            frozen(rows)
            student.eval()(rows)
        _require_tensor(target, options.hint_teacher, "teacher")
        _require_tensor(output, options.hint_student, "student")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            regressor = _regressor(output[0], target[0])

        def mismatch(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                frozen(x)
            error = F.mse_loss(_resize(regressor(output[0]), target[0]), target[0])
            return error / target[0].square().mean().clamp(min=1e-12)

        yield mismatch, regressor


@contextmanager
def _captured_output(layer: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The latest output of `layer`, as the only element of the list."""
    latest: list[torch.Tensor] = []

    def keep(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        latest[:] = [output]

    handle = layer.register_forward_hook(keep)
    try:
        yield latest
    finally:
        handle.remove()


def _layer(module: nn.Module, name: str, whose: str) -> nn.Module:
    """The layer `name`; if empty, the middle one of all with weights of two axes or more."""
    layers = {
        path: layer
        for path, layer in module.named_modules()
        if path and any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False))
    }
    if not layers:
        raise StepRefused(f"the {whose} has no layer with weights of two axes or more to take hints from")
    if not name:
        name = list(layers)[len(layers) // 2 - (len(layers) % 2 == 0)]
    modules: dict[str, nn.Module] = dict(module.named_modules())
    if name not in modules:
        raise StepRefused(
            f"hint_{whose} = {name!r} is not a layer of the {whose}; it has {', '.join(layers)}"
        )
    return modules[name]


def _require_tensor(outputs: list[Any], name: str, whose: str) -> None:
    """Requires one tensor: a module may use a layer's weights without calling it, or return several tensors."""
    if not outputs or not isinstance(outputs[0], torch.Tensor):
        problem = "does not return a single tensor" if outputs else "is not called"
        raise StepRefused(
            f"the {whose}'s layer {name or 'in the middle'} {problem}; name another one in hint_{whose}"
        )


def _regressor(output: torch.Tensor, target: torch.Tensor) -> nn.Module:
    """A linear map over channels: a 1x1 convolution of maps [B, C, H, W], else over the last axis."""
    if output.ndim != target.ndim or (output.ndim != 4 and output.shape[:-1] != target.shape[:-1]):
        raise StepRefused(
            f"the student's layer returns {tuple(output.shape[1:])} for a row and the teacher's {tuple(target.shape[1:])}; "
            "name layers of the same kind in hint_student and hint_teacher"
        )
    if output.ndim == 4:
        return nn.Conv2d(output.shape[1], target.shape[1], 1)
    return nn.Linear(output.shape[-1], target.shape[-1])


def _resize(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Feature maps pooled, or repeated, to the size of the teacher's."""
    return F.adaptive_avg_pool2d(output, (target.shape[-2], target.shape[-1])) if output.ndim == 4 else output
