"""The canaries' audit of the noise that an experiment's own rounds get: by the code that clips, adds up and noises updates in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.errors import UserError
from coordinator.privacy.accountant import Spending
from coordinator.privacy.audit import canaries
from coordinator.privacy.audit.canaries import Bound, Release
from coordinator.privacy.audit.clients import Audited
from strategies import presets
from strategies.params import Params, materialize
from strategies.privacy import central
from strategies.privacy.central import CentralNoise
from strategies.privacy.noise.additive import FloatNoise, Normals
from strategies.update import Update

MAX_ROUNDS = 100
"""Rounds that are played at most; the claim that is compared is that of as many."""


def why_not(audited: Audited) -> str | None:
    """Why the canaries say nothing of the experiment; None: they do."""
    table = audited.experiment.privacy
    if table.mechanism is None:
        return "the experiment claims no epsilon"
    if table.mechanism != "central":
        return f'privacy.mechanism = "{table.mechanism}" has no canaries yet'
    if table.sampling == "fixed":
        return 'privacy.sampling = "fixed" is accounted for by replacing a client, and canaries are clients that are there or not'
    return None


def audit(audited: Audited, spending: Spending, noise: CentralNoise, count: int) -> Bound:
    """The lower bound on epsilon of the experiment's rounds by `count` canaries, beside what the accountant claims of as many rounds."""
    rounds = min(MAX_ROUNDS, audited.run_plan.rounds)
    return canaries.measure(
        release_of(noise, count, lambda number: audited.rng("noise", number)),
        noise.clip_norm,
        rounds,
        spending.kind.probability,
        spending.delta,
        audited.rng("canaries"),
        count,
        claimed=spending.after(rounds).epsilon,
    )


def release_of(noise: CentralNoise, count: int, normals: Callable[[int], Normals]) -> Release:
    """The sums that rounds with this noise release of `count` canaries. `normals`: the source of a round's noise."""
    strategy = noise.limit(presets.get("fedavg"), noise.clip_norm)

    def release(updates: Sequence[Update], number: int) -> Params:
        fold = strategy.start(max(1, len(updates)))
        for position, update in enumerate(updates):
            fold.add(position, strategy.transform(update))
        summed = fold.finish() if updates else central.nothing(canaries.no_update(count))
        noised = materialize(noise.add_noise(summed, noise.clip_norm, FloatNoise(normals(number))).delta)
        return {name: value * noise.cohort for name, value in noised.items()}

    return release


def require_known(audited: Audited) -> None:
    """Refuses mechanisms whose noise this audit would not draw as a run does."""
    name = audited.experiment.privacy.mechanism
    if name in ("ftrl", "example"):
        raise UserError(
            f'privacy.mechanism = "{name}": its noise is not that of single rounds, and the audit cannot attack it yet; audit the same '
            "experiment without it, to see what it has to hide"
        )
