"""Noise that a train task asks this device to add itself: what is refused before training, and what becomes of an update.

The coordinator from which the noise protects also writes the task. So the device looks for itself whether anything would leave it without noise.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from edge_client.train import schedule
from edge_client.train.resolve import INSTALL_OPACUS, CannotRun
from edge_client.wire.device import TaskMessage
from edge_client.wire.privacy import NoiseTask
from strategies import personalisation
from strategies.client_rules import PlainSGD, Proximal
from strategies.privacy.clients import add_noise
from strategies.privacy.noise.secure import SecureSource, Source
from strategies.update import Update


def read_noise(message: TaskMessage, runtime: str) -> NoiseTask | None:
    """What a train task says of noise; None: the device adds none itself.

    Raises:
        CannotRun: noise would not hide all that leaves this device, or this device cannot add it.
        InvalidDocument: it is no such object.
    """
    noise = NoiseTask.of(message)
    if noise is None:
        return None
    rule = personalisation.from_options(message.rule)
    if not isinstance(rule, PlainSGD | Proximal):
        raise CannotRun(
            "failed",
            f"the task asks for noise and for the client rule {rule.name!r}, which does more with rows than take steps, without noise; "
            "this device adds noise for the rules plain and proximal",
        )
    if message.secure is not None:
        raise CannotRun(
            "failed",
            "the task asks for noise of this device's own and for secure aggregation; expected one of them",
        )
    if noise.mechanism == "local" and message.code is not None:
        raise CannotRun(
            "failed",
            f"the task asks for noise on the update and for the code {message.code.get('name')!r}, which cannot write the noise; "
            "expected one of them",
        )
    if noise.mechanism == "example":
        _require_torch(runtime)
    return noise


def _require_torch(runtime: str) -> None:
    if runtime != "torch":
        raise CannotRun(
            "wrong_runtime",
            f"the task asks for DP-SGD in {runtime}, but it needs the gradients of single rows, which only torch computes",
        )
    if find_spec("opacus") is None:
        raise CannotRun(
            "wrong_runtime", f"DP-SGD needs opacus, which is not installed here: {INSTALL_OPACUS}"
        )


def require_covered(noise: NoiseTask, message: TaskMessage, rows: int) -> None:
    """Checks that a device with so many rows spends no more by DP-SGD than the account of its run says.

    Raises:
        CannotRun: it would spend more.
    """
    steps = schedule.count(rows, message.batch_size, epochs=message.epochs, steps=message.steps)
    if rows and not noise.covers(rows, steps):
        covered = "; ".join(
            f"{each.rows} or more rows with at most {each.steps} steps" for each in noise.limits
        )
        raise CannotRun(
            "limits",
            f"with its {rows} rows it would take {steps} steps of DP-SGD a round, which the privacy account of this run does not "
            f"cover: it covers {covered or 'no device'}",
        )


def hide(update: Update, message: TaskMessage, noise: NoiseTask, source: Source | None = None) -> Update:
    """The update as it leaves the device under `local`: with all of its noise, and nothing else that its rows decide.

    Its number of examples is 1, its steps are those of one example, its training loss is 0. `source`: default: the operating system.
    """
    noised = add_noise(update, noise.clip_norm, noise.noise_multiplier, source or SecureSource())
    steps = schedule.count(1, message.batch_size, epochs=message.epochs, steps=message.steps)
    return replace(noised, num_steps=steps, train_loss=0.0)


def describe(noise: NoiseTask) -> str:
    """For the device's ledger: how an update is protected."""
    norm, deviation = noise.clip_norm, noise.noise_multiplier * noise.clip_norm
    if noise.mechanism == "local":
        return f"clipped to norm {norm:g}, with noise of standard deviation {deviation:g} on each value"
    return (
        f"trained by DP-SGD: the gradient of each row clipped to norm {norm:g}, with noise of standard deviation {deviation:g} on "
        "their sum in each step"
    )
