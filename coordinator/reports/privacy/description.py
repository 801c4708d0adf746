"""What reports and the operator API say of a run's differential privacy: the guarantee, what it assumes, and what is outside of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.privacy.accountant import Guarantee
from coordinator.privacy.mechanism import Mechanism, rounds_within

if TYPE_CHECKING:
    from coordinator.db.privacy import LedgerRow
    from coordinator.experiments.schema import FleetKind

_SIMULATED = (
    "whoever knows the seed: the noise and the cohorts of a simulation follow from it",
    "the test losses and accuracies in rounds.csv, events.jsonl and report.json, which are computed from clients' rows without noise; keep "
    "these files to yourself",
)
_UPDATES = "the number of updates and their training loss in rounds.csv and events.jsonl; keep these files to yourself"
_BESIDE_UPDATES = "that a client takes part, when it answers, and whether its training failed"
_COORDINATOR = "the coordinator, which sees each update before it is summed and must be trusted with it"
_BY_CLIENTS: dict[str, tuple[str, ...]] = {
    "distributed": (
        "clients that leave out their noise or tell it to the coordinator: the others' noise is the less",
        _BESIDE_UPDATES,
    ),
    "local": (_BESIDE_UPDATES,),
    "example": (
        "how many rows a client has, how many steps it took, that it took part, when it answers, and whether its training failed",
        "that a client's rows are of this kind at all: rows are hidden singly, not what many of them have in common",
    ),
}
_ON_DEVICES = (
    "losses and accuracies, the number of updates, their training loss and the times in the report, the rounds and the events, which are "
    "computed from devices' rows, or follow from them, without noise; show them to nobody who may not see the rows",
    "statistics rounds on the same devices, which have no noise",
)
_CHOICES = "choices that somebody makes by these figures, such as of learning rates, of the clipping norm, or of the best of several runs"

_POISSON_ON_DEVICES = (
    "only devices that are there can be drawn, each by itself, by the operating system's random numbers. This supposes that whether a device "
    "is there does not depend on whether it was drawn before",
    "who was drawn is known to those who may read the runs of this coordinator, and to nobody else",
)
_ON_ALL_DEVICES = "noise and draws come from the operating system's random numbers; no seed tells them"
_BY_DEVICES = {
    "local": "each device clips its update and adds the noise itself, by its operating system's random numbers: one whose software does not is not "
    "hidden, which nobody else can see",
    "distributed": "each device adds its share of the noise itself, by its operating system's random numbers, before it masks its update",
    "example": "each device clips its rows' gradients and adds the noise itself, and draws which rows a step takes, by its operating system's random "
    "numbers: the rows of one whose software does not are not hidden. A device with fewer rows than the account knows of declines",
}
_KEPT_KEY = (
    "the noise of DP-FTRL is drawn from a key that the operating system drew. It lies in the folder privacy-keys of the coordinator's home "
    "until the run is finished; whoever reads it can subtract the noise"
)


def describe_guarantee(
    experiment: Mapping[str, Any], guarantee: Guarantee, noise_multiplier: float
) -> dict[str, Any]:
    """The guarantee with its mechanism and its assumptions. `experiment`: resolved, as JSON."""
    table = experiment["privacy"]
    return {
        "mechanism": table["mechanism"],
        "clipping": table["clipping"],
        "noise_multiplier": noise_multiplier,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "accountant": guarantee.accountant,
        "adjacency": guarantee.adjacency,
        "sampling": guarantee.sampling,
        "budget": table.get("budget"),
        "in_words": guarantee.in_words(),
    }


def describe_ledger(experiment: Mapping[str, Any], ledger: LedgerRow) -> dict[str, Any]:
    """What a run on devices has spent by its ledger. `experiment`: as above."""
    mechanism = Mechanism.of_json(ledger.mechanism)
    guarantee = mechanism.spending().after(ledger.rounds)
    return {
        **describe_guarantee(experiment, guarantee, mechanism.noise_multiplier),
        "rounds": ledger.rounds,
        **what_is_left(mechanism, ledger.rounds, experiment["privacy"].get("budget")),
        "assumptions": list(assumptions(mechanism)),
        "outside": outside(experiment, "devices"),
    }


def what_is_left(mechanism: Mechanism, rounds: int, budget: float | None) -> dict[str, Any]:
    """How many more of its rounds a run may begin, and whether its budget ends it before the last one."""
    within = mechanism.rounds if rounds >= mechanism.rounds else rounds_within(mechanism, budget)
    return {
        "rounds_left": max(0, within - rounds),
        "ended_by_budget": rounds >= within and within < mechanism.rounds,
    }


def assumptions(mechanism: Mechanism) -> Sequence[str]:
    """What an epsilon of a run on devices supposes, besides its accountant."""
    found = [mechanism.spending().after(1).sampling_words]
    found.append(_BY_DEVICES[mechanism.by_devices] if mechanism.by_devices else _ON_ALL_DEVICES)
    if mechanism.sampling == "poisson":
        found += _POISSON_ON_DEVICES
    if mechanism.is_correlated:
        found.append(_KEPT_KEY)
    return found


def outside(experiment: Mapping[str, Any], fleet: FleetKind) -> list[str]:
    """What the guarantee does not cover, in words. `experiment`: as above."""
    own = (_COORDINATOR,) if fleet == "devices" else (_COORDINATOR, _UPDATES)
    found = [*_BY_CLIENTS.get(experiment["privacy"]["mechanism"], own)]
    found += [*(_ON_DEVICES if fleet == "devices" else _SIMULATED), _CHOICES]
    simulation, data = experiment["simulation"], experiment["data"]
    if fleet != "devices" and (simulation.get("fine_tune") or simulation["local_baseline"] != "off"):
        found.append("models that single clients train, and their figures")
    if experiment["model"].get("init") is not None:
        found.append("the rows from which model.init was trained")
    if data.get("scale") == "federated" or data.get("categories") is not None:
        found.append(
            "the scale and the categories of the table, which are statistics of all rows without noise"
        )
    if fleet == "devices" and experiment["devices"]["evaluate_every"]:
        found.append("what devices report of the model on their held-out rows (devices.evaluate_every)")
    return found
