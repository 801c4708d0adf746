"""Differential privacy of a run on devices: its plan, and its ledger in the database.

    ledger.enter     who may be drawn, or gets a task   transaction     Poisson sampling, and where devices add the noise
    ledger.charge    what the round spends, and whose   transaction     then the noise is drawn
    ledger.keep      the noised aggregate               blob, row       then the model moves, is scored and committed

Noise and draws come from the operating system, so nobody can draw them again, the coordinator included. A round whose noised aggregate is kept
releases that, also if the process is killed or the run is ended and taken up again. Before it is kept, nobody has seen anything of
it, so new noise may be drawn.

The noise of DP-FTRL takes back noise of earlier rounds, which must be known for that: it comes from a key of the run, in a file that only the
coordinator's user can read. The file is removed when the run is finished.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection

from coordinator.context.services import Services
from coordinator.db import privacy as rows
from coordinator.errors import UserError
from coordinator.experiments.schema import Experiment
from coordinator.privacy.correlated import CorrelatedSpending
from coordinator.privacy.mechanism import Mechanism
from coordinator.rounds.plan import RunPlan
from coordinator.rounds.private_round import PrivacyPlan, Release
from coordinator.runs.privacy import by_clients
from coordinator.runs.privacy.by_clients import Sizes
from coordinator.runs.privacy.earlier import compose_with_earlier, count_enrolled, declared_rows
from coordinator.runs.privacy.plan import noise_of, plan_mechanism, require_affordable
from edge_client.files import write_durably
from strategies.params import elementwise
from strategies.privacy.noise.additive import GridNoise, NoiseSource, RoundedNoise, SourceNormals
from strategies.privacy.noise.distributed import GroupNoise
from strategies.privacy.noise.rounds import CorrelatedRounds
from strategies.privacy.noise.secure import KeyedSource, SecureSource, draw_uniforms
from strategies.update import Aggregate

_KEYS = "privacy-keys"
_KEY_BYTES = 32


def with_privacy(
    run_plan: RunPlan, experiment: Experiment, services: Services, run: str, project: str, values: int = 0
) -> RunPlan:
    """The plan of a run on devices with what its experiment says of privacy. Opens the run's ledger.

    `values`: of an update; a run that has a ledger does not need it.

    Raises:
        UserError: delta is too large for so many devices, no noise spends the epsilon, or the key of the run's noise is lost.
    """
    table = experiment.privacy
    if table.mechanism is None:
        return run_plan
    cohort = run_plan.closing.wanted
    row = services.database.read(partial(rows.find, run=run))
    if row is None:
        sizes = Sizes(values, declared_rows(services, project, experiment.data.dataset))
        mechanism = plan_mechanism(experiment, cohort, count_enrolled(services, project), sizes)
        opened = partial(rows.open_ledger, run=run, mechanism=mechanism.to_json())
        row = services.database.write(opened).result()
    mechanism = Mechanism.of_json(row.mechanism)
    spending = mechanism.spending()
    plan = PrivacyPlan(
        noise=noise_of(experiment, mechanism, cohort),
        noise_multiplier=mechanism.noise_multiplier,
        sampling=mechanism.sampling,
        clients=mechanism.clients,
        guarantee_after=spending.after,
        ledger=DeviceLedger(services, run, counts_draws=mechanism.sampling == "poisson"),
        source=_make_source(mechanism, services.settings.home / _KEYS / run, row.rounds),
        uniforms=lambda number, count: draw_uniforms(SecureSource(), count),
        budget=table.budget,
    )
    require_affordable(plan.epsilon_after(1), table)
    assert table.clip_norm  # checked
    noise = by_clients.noise_of_devices(mechanism, table.clip_norm)
    return replace(run_plan, privacy=plan, clip_norm=table.clip_norm_on_devices, noise_options=noise)


def noise_in_sums(services: Services, run: str) -> GroupNoise | None:
    """The noise that the run's devices add inside secure aggregation, by its ledger; None: none."""
    row = services.database.read(partial(rows.find, run=run))
    in_ring = None if row is None else Mechanism.of_json(row.mechanism).in_ring
    return None if in_ring is None else in_ring.group


def find_notices(experiment: Experiment, services: Services, run: str, project: str) -> list[str]:
    """What earlier runs have spent on the same data set, and what they and this one will together."""
    row = services.database.read(partial(rows.find, run=run))
    if row is None:
        return []
    planned = Mechanism.of_json(row.mechanism)
    found = compose_with_earlier(planned, experiment.data.dataset, services, project)
    if found is None:
        return []
    return [
        f"privacy: {found.runs} earlier run{'s' * (found.runs != 1)} on {found.dataset!r} may have spent epsilon {found.before:.4g} of a {planned.hides}; "
        f"with all rounds of this one it may be {found.after:.4g} (delta {found.delta:g})"
    ]


def remove_key(services: Services, run: str) -> None:
    """Removes the key of a finished run's noise, if it has one."""
    (services.settings.home / _KEYS / run).unlink(missing_ok=True)


class DeviceLedger:
    """Implements `coordinator.rounds.private_round.Ledger` in the database.

    `counts_draws`: whether a device spends in each round for which it may be drawn, rather than in those whose sum holds its update.
    """

    def __init__(self, services: Services, run: str, *, counts_draws: bool) -> None:
        self._services = services
        self._run = run
        self._counts_draws = counts_draws

    def enter(self, round_number: int, clients: Sequence[str]) -> None:
        self._write(partial(rows.count_round, run=self._run, number=round_number, names=clients))

    def charge(self, round_number: int, epsilon: float, clients: Sequence[str]) -> None:
        now = self._services.clock()

        def work(connection: Connection) -> None:
            rows.charge(connection, self._run, round_number, epsilon, now)
            if not self._counts_draws:
                rows.count_round(connection, self._run, round_number, clients)

        self._write(work)

    def find_release(self, round_number: int) -> Release | None:
        """Raises: BlobDamaged: the aggregate is damaged; it cannot be drawn again."""
        row = self._services.database.read(partial(rows.find, run=self._run))
        if row is None or row.released is None or row.released["round"] != round_number:
            return None
        return self._open(row.released)

    def keep(self, round_number: int, release: Release) -> Release:
        blobs, aggregate = self._services.blobs, release.aggregate
        assert aggregate is not None  # central noise is released of any round
        with blobs.reference_lock, ExitStack() as held:
            # What is released is rounded after its noise, so the rounding tells nothing.
            rounded = elementwise(lambda value: np.asarray(value, np.float32), aggregate.delta)
            blob = blobs.put_arrays(rounded).sha256
            held.enter_context(blobs.held(blob))
            released = {
                "round": round_number,
                "blob": blob,
                "clip_norm": release.clip_norm,
                "num_updates": aggregate.num_updates,
                "num_examples": aggregate.num_examples,
                "train_loss": aggregate.train_loss if aggregate.num_updates else None,
                "figures": release.figures,
            }
            self._write(partial(rows.keep_release, run=self._run, released=released))
        return self._open(released)

    def _open(self, released: Mapping[str, Any]) -> Release:
        loss = released["train_loss"]
        aggregate = Aggregate(
            self._services.blobs.open_arrays(released["blob"]),
            {},
            released["num_updates"],
            released["num_examples"],
            float("nan") if loss is None else loss,
        )
        return Release(aggregate, released["clip_norm"], released["figures"])

    def _write(self, work: Callable[[Connection], object]) -> None:
        self._services.database.write(work).result()


def _make_source(mechanism: Mechanism, key_file: Path, charged: int) -> Callable[[int], NoiseSource]:
    """The coordinator's noise of each round. `charged`: rounds that have noise already."""
    spending = mechanism.spending()
    if not isinstance(spending, CorrelatedSpending):
        return lambda number: GridNoise(SecureSource())
    key = _read_key(key_file, charged)
    normals = CorrelatedRounds(spending.noise, lambda *numbers: SourceNormals(KeyedSource(key, *numbers)))
    return lambda number: RoundedNoise(normals.round(number))


def _read_key(file: Path, charged: int) -> bytes:
    """The key of a run's noise, made if no round has noise yet.

    Raises:
        UserError: it is lost or damaged.
    """
    try:
        key = file.read_bytes()
    except FileNotFoundError:
        if charged:
            raise UserError(
                f"{file}, the key of the run's noise, is missing, and {charged} rounds have noise from it that the next ones would take back; "
                "restore it from a backup of the coordinator's home, or start another run from this one's model"
            ) from None
        key = os.urandom(_KEY_BYTES)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_durably(file, key, mode=0o600)
    if len(key) != _KEY_BYTES:
        raise UserError(
            f"{file}, the key of the run's noise, has {len(key)} bytes, expected {_KEY_BYTES}; restore it from a backup"
        )
    return key
