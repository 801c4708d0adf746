"""What an attacker sees of a client's update, under each defence.

Who the attacker is differs. The coordinator receives what clients send: plain updates, unless clients noise them (local differential
privacy) or only their sum can be read (secure aggregation). A reader of the released model has the noise of central differential privacy before
him; the coordinator, which adds it, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.privacy.section import Privacy
from strategies.params import Params, materialize
from strategies.strategy import ClipNorm
from strategies.update import Update

Where = Literal["central", "local", "distributed"]
COORDINATOR = "the coordinator"
READER = "a reader of two models"

SUPPOSED_GROUP = 16
SUPPOSED_NOISE = 1.0


@dataclass(frozen=True)
class Defences:
    """The defences of an experiment.

    Attributes:
        group_size: clients whose updates are added before the coordinator reads their sum; 1: no secure aggregation.
        clip_norm: bound of an update's L2 norm; None: of no update.
        noise_multiplier: standard deviation of the sum's noise over `clip_norm`; of a single update's if it is `local`.
        where: who adds the noise.
    """

    group_size: int = 1
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    where: Where = "central"

    @property
    def are_none(self) -> bool:
        return self.group_size == 1 and self.clip_norm is None and not self.noise_multiplier


@dataclass(frozen=True)
class View:
    """What one attacker sees.

    Attributes:
        defence: in words. `observer`: who the attacker is.
        group_size: updates in the sum; 1: it is a client's own.
        clips: whether updates are clipped first.
        noise: standard deviation of the noise on the sum, over the clip norm.
        is_supposed: whether the experiment has no such defence, and this shows what it would change.
    """

    defence: str
    observer: str = COORDINATOR
    group_size: int = 1
    clips: bool = False
    noise: float = 0.0
    is_supposed: bool = False


PLAIN = View("none")


@dataclass(frozen=True)
class Overrides:
    """Options that replace what `[privacy]` says; None: they are not given."""

    group_size: int | None = None
    clip_norm: float | None = None
    noise_multiplier: float | None = None


def of_experiment(table: Privacy, noise_multiplier: float | None, given: Overrides) -> Defences:
    """The defences of `[privacy]`. `noise_multiplier`: of its mechanism, if it has one.

    Raises:
        UserError: noise has no scale.
    """
    where: Where = table.mechanism if table.mechanism in ("local", "distributed") else "central"
    own_group = table.group_size if table.secure_aggregation else None
    found = Defences(
        given.group_size or own_group or 1,
        table.clip_norm if given.clip_norm is None else given.clip_norm,
        (noise_multiplier or 0.0) if given.noise_multiplier is None else given.noise_multiplier,
        where,
    )
    if found.noise_multiplier and found.clip_norm is None:
        raise UserError(
            "--noise-multiplier is a multiple of the clip norm, which is missing: give --clip-norm too, such as --clip-norm 0.5"
        )
    return found


def views(defences: Defences, cohort: int, clients: int) -> list[View]:
    """What attackers see: without any defence, and with those of the experiment. If it has none, what usual ones would change.

    `cohort`: clients in a round, of so many `clients`.
    """
    if defences.are_none:
        supposed = [
            _sum_of(min(SUPPOSED_GROUP, clients)),
            View(f"each client adds noise {SUPPOSED_NOISE:g}", clips=True, noise=SUPPOSED_NOISE),
            _released(cohort, SUPPOSED_NOISE),
        ]
        return [PLAIN, *(replace(each, is_supposed=True) for each in supposed)]
    clips, found = defences.clip_norm is not None, [PLAIN]
    group, sigma = defences.group_size, defences.noise_multiplier
    if group == 1 and defences.where == "local" and sigma:
        found.append(View(f"clipped, noise {sigma:g} added by the client", clips=True, noise=sigma))
    elif group == 1 and clips:
        found.append(View("clipped", clips=True))
    if group > 1:
        each = {"central": 0.0, "local": sigma * group**0.5, "distributed": sigma}[defences.where]
        seen = replace(_sum_of(group), clips=clips, noise=each)
        found.append(
            replace(seen, defence=f"{seen.defence}{', clipped' * clips}{f', noise {each:g}' if each else ''}")
        )
    if defences.where == "central" and sigma:
        found.append(_released(cohort, sigma))
    return found


def _sum_of(group: int) -> View:
    return View(f"secure aggregation: sum of {group} clients", group_size=group)


def _released(cohort: int, sigma: float) -> View:
    return View(f"clipped, sum of {cohort} clients, noise {sigma:g}", READER, cohort, clips=True, noise=sigma)


def observe(view: View, updates: Sequence[Update], clip_norm: float, rng: np.random.Generator) -> Params:
    """The mean update that the attacker computes from what he sees of the first `view.group_size` of `updates`.

    Updates count by their examples, or all alike where they are clipped for differential privacy.
    """
    seen = updates[: view.group_size]
    if view.clips:
        seen = [ClipNorm(clip_norm).apply(each, {})[0] for each in seen]
    weights = [1.0 if view.clips else float(each.num_examples) for each in seen]
    total = {name: np.zeros(value.shape, np.float64) for name, value in materialize(seen[0].delta).items()}
    for weight, each in zip(weights, seen, strict=True):
        for name, value in materialize(each.delta).items():
            total[name] += weight * value
    scale = view.noise * clip_norm
    return {
        name: np.asarray(
            (value + (rng.normal(0.0, scale, value.shape) if scale else 0.0)) / sum(weights), np.float32
        )
        for name, value in total.items()
    }
