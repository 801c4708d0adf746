"""The canaries' audit of the noise that an experiment's own rounds get: by the code that clips, adds up and noises updates in a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from coordinator.errors import UserError
from coordinator.privacy.accountant import Spending
from coordinator.privacy.audit import canaries
from coordinator.privacy.audit.canaries import Bound, Release
from coordinator.privacy.audit.clients import Audited
from coordinator.privacy.distributed import DistributedSpending
from coordinator.privacy.local import LocalSpending
from coordinator.runs.privacy.by_clients import SpendingByClients, group_noise
from strategies import presets
from strategies.params import Params, materialize
from strategies.privacy import central, clients
from strategies.privacy.central import CentralNoise
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.additive import FloatNoise, Normals
from strategies.privacy.noise.distributed import DistributedNoise, GroupNoise
from strategies.privacy.noise.secure import SeededSource, Source
from strategies.update import Update

MAX_ROUNDS, MAX_SECURE_ROUNDS = 100, 10
"""Rounds that are played at most; the claim that is compared is that of as many. Those with distributed noise take a second each."""

AUDIT_BITS = 28
"""Of a residue: enough for sums of thousands of canaries, more than groups have."""


def why_not(audited: Audited) -> str | None:
    """Why the canaries say nothing of the experiment; None: they do."""
    table = audited.experiment.privacy
    if table.mechanism is None:
        return "the experiment claims no epsilon"
    if table.mechanism not in ("central", "distributed", "local"):
        return f'privacy.mechanism = "{table.mechanism}" has no canaries yet'
    if table.sampling == "fixed":
        return 'privacy.sampling = "fixed" is accounted for by replacing a client, and canaries are clients that are there or not'
    return None


def audit(
    audited: Audited,
    spending: Spending | SpendingByClients,
    noise: CentralNoise | ClientNoise,
    count: int,
) -> Bound:
    """The lower bound on epsilon of the experiment's rounds by `count` canaries, beside what the accountant claims of as many rounds."""
    rounds = min(MAX_ROUNDS, audited.run_plan.rounds)
    probability = 1.0
    if isinstance(noise, CentralNoise):
        assert isinstance(spending, Spending)  # of its mechanism
        release = release_of(noise, count, lambda number: audited.rng("noise", number))
        probability, claimed = spending.kind.probability, spending.after(rounds)
    else:
        # Canaries take part as often as a client may.
        assert isinstance(
            spending, DistributedSpending | LocalSpending
        )  # of mechanisms that `require_known` lets pass
        separation = spending.participation.separation
        rounds = min(MAX_SECURE_ROUNDS, spending.participation.most)
        claimed = spending.after(min(rounds * separation, spending.participation.rounds))
        release = _release_by_clients(audited, spending, noise, count)
    return canaries.measure(
        release,
        noise.clip_norm,
        rounds,
        probability,
        spending.delta,
        audited.rng("canaries"),
        count,
        claimed=claimed.epsilon,
    )


def _release_by_clients(
    audited: Audited, spending: DistributedSpending | LocalSpending, noise: ClientNoise, count: int
) -> Release:
    def source(number: int) -> Source:
        return SeededSource(audited.rng("noise", number))

    if isinstance(spending, LocalSpending):
        return local_release_of(noise, count, source)
    return secure_release_of(group_noise(audited.experiment.privacy, noise.noise_multiplier), count, source)


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


def secure_release_of(group: GroupNoise, count: int, source: Callable[[int], Source]) -> Release:
    """The sums that groups with distributed noise release of `count` canaries, in which as few clients add noise as may stay.

    A client that is not there sends zeros with its noise: that is what the account compares. `source`: of a round's noise.
    """
    noise = DistributedNoise(
        group.kind, count, group.clip_norm, group.noise_multiplier, count, count, AUDIT_BITS
    )

    def release(updates: Sequence[Update], number: int) -> Params:
        drawn, total = source(number), np.zeros(noise.length, np.uint64)
        absent = [canaries.no_update(count)] * (count - len(updates))
        for delta in [*(each.delta for each in updates), *absent]:
            total += noise.encode(np.asarray(delta[canaries.NAME]), number, drawn)
        return {canaries.NAME: noise.decode(total % np.uint64(noise.modulus), number)}

    return release


def local_release_of(noise: ClientNoise, count: int, source: Callable[[int], Source]) -> Release:
    """What `count` canaries send that noise their updates themselves, as if it were a sum without noise of others.

    A client that is not there sends the opposite of its update: the account compares any two updates of a client. `source`: of a round's noise.
    """

    def release(updates: Sequence[Update], number: int) -> Params:
        drawn, present = source(number), {int(np.argmax(each.delta[canaries.NAME])) for each in updates}
        sent = np.zeros(count)
        for index in range(count):
            value = np.full(1, 2 * noise.clip_norm if index in present else -2 * noise.clip_norm, np.float32)
            noised = clients.add_noise(
                Update({canaries.NAME: value}, 1, 1, 0.0), noise.clip_norm, noise.noise_multiplier, drawn
            )
            sent[index] = noised.delta[canaries.NAME][0]
        return {canaries.NAME: (sent + noise.clip_norm) / 2}

    return release


def require_known(audited: Audited) -> None:
    """Refuses mechanisms whose noise this audit would not draw as a run does."""
    name = audited.experiment.privacy.mechanism
    why = {
        "ftrl": "its noise is not that of single rounds",
        "example": "its noise is in the steps of clients, which hide rows and not clients",
    }
    if name in why:
        raise UserError(
            f'privacy.mechanism = "{name}": {why[name]}, and the audit cannot attack it yet; audit the same experiment without it, to see '
            "what it has to hide"
        )
