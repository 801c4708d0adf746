"""Runs whose clients add the noise: their account, from the table `[privacy]`, and what workers and devices need to know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from coordinator.errors import UserError
from coordinator.experiments.privacy.section import Privacy
from coordinator.experiments.schema import Experiment
from coordinator.privacy.accountant import CannotAccount
from coordinator.privacy.distributed import DistributedSpending, find_distributed_noise
from coordinator.privacy.local import LocalSpending, find_local_noise
from coordinator.privacy.mechanism import Mechanism, RingNoise
from coordinator.privacy.rows import RowSpending, RowWork, find_hardest, find_row_noise
from coordinator.rounds.plan import RunPlan
from coordinator.workers.pool import WorkerPool
from edge_client.wire.privacy import NoiseTask, RowLimit
from strategies.privacy.clients import ClientNoise
from strategies.privacy.noise.correlated import Participation
from strategies.privacy.noise.distributed import GroupNoise, Kind


@dataclass(frozen=True)
class Sizes:
    """What the noise of clients depends on. `values`: of an update. `rows`: of each client."""

    values: int = 0
    rows: Sequence[int] = ()


UNKNOWN = Sizes()


class SizesUnknown(UserError):
    """What the noise of clients depends on is not known yet."""


SpendingByClients = DistributedSpending | LocalSpending | RowSpending


def account(experiment: Experiment, cohort: int, sizes: Sizes) -> SpendingByClients:
    """The account of a resolved experiment whose clients add the noise, and keep their separation.

    Raises:
        UserError: no noise spends the epsilon, or the ring of secure aggregation does not hold it.
        SizesUnknown: `sizes` lacks what the mechanism depends on.
    """
    table = experiment.privacy
    assert table.minimum_separation  # resolved
    participation = Participation(experiment.federation.rounds, table.minimum_separation)
    try:
        if table.mechanism == "local":
            return _account_local(table, participation)
        if table.mechanism == "example":
            return _account_rows(experiment, participation, sizes.rows)
        return _account_distributed(table, participation, cohort, sizes.values)
    except CannotAccount as error:
        raise UserError(f"privacy.epsilon = {table.epsilon:g}: {error}") from None


def _account_local(table: Privacy, participation: Participation) -> LocalSpending:
    assert table.delta and table.accountant  # resolved
    multiplier = table.noise_multiplier
    if multiplier is None:
        assert table.epsilon  # or a noise multiplier
        multiplier = find_local_noise(participation, table.delta, table.epsilon, table.accountant)
    return LocalSpending(multiplier, participation, table.delta, table.accountant)


def _account_rows(experiment: Experiment, participation: Participation, rows: Sequence[int]) -> RowSpending:
    table, local = experiment.privacy, experiment.local
    assert table.delta and table.accountant  # resolved
    if not any(rows):
        raise SizesUnknown(
            f'privacy.mechanism = "example" depends on how many rows clients have, and none has said so of {experiment.data.dataset!r}; '
            "start the run once devices with this data set have checked in"
        )
    work = find_hardest(rows, local.batch_size, local.epochs, local.steps)
    if table.delta >= 1 / max(rows):
        raise UserError(
            f"privacy.delta = {table.delta:g} is not below one over the number of rows of a client, {1 / max(rows):g}: publishing one row "
            "whole would be private by it; take a tenth of that or less"
        )
    spending = RowSpending(table.noise_multiplier or 1.0, work, participation, table.delta, table.accountant)
    if table.noise_multiplier is not None:
        return spending
    assert table.epsilon  # or a noise multiplier
    return replace(spending, noise_multiplier=find_row_noise(spending, table.epsilon))


def _account_distributed(
    table: Privacy, participation: Participation, cohort: int, values: int
) -> DistributedSpending:
    assert table.delta and table.group_size  # resolved
    if not values:
        raise SizesUnknown(
            'the epsilon of privacy.mechanism = "distributed" depends on how many values the model has, which is known once the run is prepared'
        )
    group, size = group_noise(table, table.noise_multiplier or 1.0), table.group_size
    try:
        if table.noise_multiplier is None:
            assert table.epsilon  # or a noise multiplier
            found = find_distributed_noise(
                group, size, cohort, values, participation, table.delta, table.epsilon
            )
            group = replace(group, noise_multiplier=found)
        return DistributedSpending(group.possible(size, cohort, values), participation, table.delta)
    except CannotAccount:
        raise
    except ValueError as error:
        raise UserError(
            f"privacy.value_bits = {table.value_bits}, privacy.group_size = {table.group_size}: {error}; take other ones"
        ) from None


def give_row_noise(
    experiment: Experiment, run_plan: RunPlan, pool: WorkerPool, folder: Path, model: Mapping[str, Any]
) -> None:
    """Lets the workers train by DP-SGD, if the experiment asks for it. `folder`, `model`: that they have open."""
    if experiment.privacy.mechanism != "example":
        return
    assert run_plan.privacy is not None  # it has a mechanism
    noise = {
        "clip_norm": run_plan.privacy.noise.clip_norm,
        "noise_multiplier": run_plan.privacy.noise_multiplier,
        "one_by_one": model["one_by_one"],
    }
    pool.broadcast({"kind": "open", "folder": str(folder), "model": {**model, "row_noise": noise}})


def make_mechanism(experiment: Experiment, cohort: int, sizes: Sizes) -> Mechanism:
    """The mechanism of a run on devices. `experiment`: resolved.

    Raises:
        UserError: as `account`.
    """
    table, federation = experiment.privacy, experiment.federation
    assert table.delta and table.accountant and table.minimum_separation  # resolved
    selected = math.ceil(cohort * federation.over_select)
    spending = account(experiment, selected, sizes)
    in_ring: RingNoise | None = None
    work: tuple[RowWork, ...] = ()
    if isinstance(spending, DistributedSpending):
        assert table.group_size  # resolved
        group = group_noise(table, spending.noise_multiplier)
        in_ring = RingNoise(group, table.group_size, selected, sizes.values)
    elif isinstance(spending, RowSpending):
        work = tuple(spending.work)
    return Mechanism(
        noise_multiplier=spending.noise_multiplier,
        sampling="none",
        cohort=selected,
        clients=max(federation.clients or 0, selected),
        rounds=federation.rounds,
        delta=table.delta,
        accountant=table.accountant,
        minimum_separation=table.minimum_separation,
        by_devices=cast(Any, table.mechanism),
        in_ring=in_ring,
        work=work,
    )


def noise_of_devices(mechanism: Mechanism, clip_norm: float) -> dict[str, Any] | None:
    """The noise that devices add themselves (`TaskMessage.noise`); None: they add none, or add it inside secure aggregation."""
    if mechanism.by_devices not in ("local", "example"):
        return None
    limits = tuple(RowLimit(each.rows, each.steps) for each in mechanism.work)
    return asdict(NoiseTask(mechanism.by_devices, clip_norm, mechanism.noise_multiplier, limits))


def client_noise(table: Privacy, spending: SpendingByClients, cohort: int, values: int) -> ClientNoise:
    """The mechanism of a resolved table whose clients add the noise."""
    assert table.clip_norm  # checked
    rows = [each.rows for each in spending.work] if isinstance(spending, RowSpending) else []
    return ClientNoise(table.clip_norm, spending.noise_multiplier, cohort, values, tuple(rows))


def group_noise(table: Privacy, noise_multiplier: float) -> GroupNoise:
    """The noise of groups of a resolved table with distributed noise."""
    assert table.noise in get_args(Kind) and table.clip_norm and table.value_bits and table.threshold
    return GroupNoise(
        cast(Kind, table.noise), table.clip_norm, noise_multiplier, table.value_bits, table.threshold
    )
