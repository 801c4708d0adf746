"""Short trainings that recover accuracy after distillation, pruning and quantization.

AdamW in one process, for small models. Compression steps differ in what they minimise (`objective`) and in how they change the
weights after every optimizer step (`after_step`: masks, proximal steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from models.compress.step import Data, OnEpoch, StepRefused
from models.labels import counting
from models.options import bounded
from models.pretrain.data.batches import Arrays, global_batches, shifted
from models.zoo.spec import ModelSpec

Objective = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
"""(module, x, y) -> scalar loss."""


@dataclass(frozen=True)
class Tuning:
    """How to train.

    Attributes:
        shift: images are moved by up to this many pixels.
        freeze: layers that do not change, running statistics included: names separated by commas, `stem,stages.0`.
    """

    epochs: int = bounded(10, 0, 100_000)
    batch_size: int = bounded(16, 1, 1_000_000)
    lr: float = bounded(1e-3, 0.0, 1e3)
    weight_decay: float = bounded(0.01, 0.0, 1e3)
    shift: int = bounded(0, 0, 64)
    freeze: str = ""


def tune(
    module: nn.Module,
    rows: Arrays,
    options: Tuning,
    rng: np.random.Generator,
    objective: Objective,
    *,
    extra_parameters: Iterable[nn.Parameter] = (),
    after_step: Callable[[int], None] = lambda step: None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> list[float]:
    """Trains `module` in place, leaves it in evaluation mode, and returns the loss of every step.

    Args:
        extra_parameters: trained too, such as those of a layer that only the objective uses.
        after_step: called with the number of the step, from 1, after the optimizer's update.

    Raises:
        StepRefused: `freeze` names no layer, or all of them; `shift` does not suit the examples; or the loss is not finite.
    """
    if not options.epochs:
        module.eval()
        return []
    _require_shiftable(rows.x, options.shift)
    frozen = named_layers(module, options.freeze, "freeze")
    trained = [p for name, p in module.named_parameters() if not is_within(name, frozen)]
    if not trained:
        raise StepRefused(f"freeze = {options.freeze!r} leaves nothing to train; set epochs = 0 instead")
    optimizer = torch.optim.AdamW(
        [*trained, *extra_parameters], options.lr, weight_decay=options.weight_decay
    )
    module.train()
    for name, part in module.named_modules():
        if is_within(name, frozen):
            part.eval()  # BatchNorm's running statistics are not parameters
    losses: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.integers(2**31)))  # for dropout, if the module has it
        for epoch in range(1, options.epochs + 1):
            before = len(losses)
            for batch in global_batches(len(rows), options.batch_size, rng):
                moved = torch.from_numpy(shifted(rows.x[batch], options.shift, rng))
                loss = objective(module, moved, torch.from_numpy(rows.y[batch]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
                after_step(len(losses))
            mean = float(np.mean(losses[before:]))
            if not np.isfinite(mean):
                raise StepRefused(f"the loss of epoch {epoch} is {mean}; lower lr = {options.lr}")
            on_epoch(epoch, mean)
    module.eval()
    return losses


def own_loss(spec: ModelSpec) -> Objective:
    """The objective that is the model's own loss."""
    return lambda module, x, y: spec.loss(module(x), y)


def labelled_rows(data: Data) -> Arrays:
    """Training rows with a label that counts; a batch without any has no loss.

    Raises:
        StepRefused: there are none.
    """
    counted = counting(data.y_train).reshape(len(data.y_train), -1).any(1)
    if not counted.any():
        raise StepRefused(
            f"none of {len(counted)} training rows has a label, expected some to fine-tune on; distil from a teacher instead"
        )
    return Arrays(data.x_train[counted], data.y_train[counted])


def named_layers(module: nn.Module, text: str, option: str) -> tuple[str, ...]:
    """The names in `text`, separated by commas, each a layer of `module` or a submodule with parameters.

    Raises:
        StepRefused: a name is unknown; `option` names the text in the message.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    parameters = [name for name, _ in module.named_parameters()]
    for name in names:
        if not any(is_within(parameter, (name,)) for parameter in parameters):
            layers = ", ".join(dict.fromkeys(parameter.rpartition(".")[0] for parameter in parameters))
            raise StepRefused(f"{option} names {name!r}, which is not a layer of this model; it has {layers}")
    return names


def is_within(name: str, layers: Iterable[str]) -> bool:
    """Whether `name`, of a layer or a parameter, is one of `layers` or inside one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _require_shiftable(x: npt.NDArray[Any], shift: int) -> None:
    if shift and (x.ndim not in (3, 4) or x.dtype != np.float32):
        raise StepRefused(
            f"shift = {shift} moves images by pixels, but examples of shape {x.shape[1:]} are not images; remove shift"
        )
