"""A forecast: what a whole run will take, from its experiment and a calibration, and how it compares with what a run took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from coordinator.experiments.schema import Experiment
from coordinator.runs.forecast.calibration import Calibration
from coordinator.runs.trials import local_baseline


@dataclass(frozen=True)
class Forecast:
    """What a run will take on this machine.

    Attributes:
        rounds, clients, clients_per_round: of the run. Rounds that end early make everything less.
        round_seconds: an average round, its scoring included.
        rounds_seconds: all rounds.
        seconds: the whole run, from the command's start to its report.
        alone_seconds: of these, training each client alone to compare with; 0: not done.
        memory_bytes: the most that all processes together use.
        client_bytes_up, client_bytes_down: of a client in a round.
        bytes_up, bytes_down: of the whole run.
        simulated_seconds: of the whole run in virtual time.
    """

    rounds: int
    clients: int
    clients_per_round: float
    round_seconds: float
    rounds_seconds: float
    seconds: float
    alone_seconds: float
    memory_bytes: int
    client_bytes_up: float
    client_bytes_down: float
    bytes_up: float
    bytes_down: float
    simulated_seconds: float | None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def predict(experiment: Experiment, measured: Calibration) -> Forecast:
    """What the run will take."""
    counted = measured.rounds[1:] or measured.rounds
    scored = measured.scored[-len(counted) :]
    rounds = experiment.federation.rounds
    due = sum(experiment.evaluation.is_due(number, rounds) for number in range(1, rounds + 1))
    with_score = [each.seconds for each, is_scored in zip(counted, scored, strict=True) if is_scored]
    without = [each.seconds for each, is_scored in zip(counted, scored, strict=True) if not is_scored]
    rounds_seconds = due * fmean(with_score) + (rounds - due) * fmean(without or with_score)
    selected = fmean(each.selected for each in counted)
    up = fmean(each.bytes_up for each in counted)
    down = fmean(each.bytes_down for each in counted)
    answered = fmean(each.selected - each.silent for each in counted)
    alone = 0.0
    # Where it goes without saying, sites are trained alone, and then they are the clients.
    if local_baseline.is_wanted(experiment, {"site_names": range(measured.clients)}):
        alone = rounds * fmean(without or with_score) / max(answered, 1.0) * measured.clients
    virtual = [each.simulated_seconds for each in counted if each.simulated_seconds is not None]
    return Forecast(
        rounds=rounds,
        clients=measured.clients,
        clients_per_round=selected,
        round_seconds=rounds_seconds / rounds,
        rounds_seconds=rounds_seconds,
        seconds=measured.start_seconds + rounds_seconds + alone + measured.end_seconds,
        alone_seconds=alone,
        memory_bytes=measured.memory_bytes,
        client_bytes_up=up / max(answered, 1.0),
        client_bytes_down=down / max(selected, 1.0),
        bytes_up=up * rounds,
        bytes_down=down * rounds,
        simulated_seconds=fmean(virtual) * rounds if virtual else None,
    )


def happened(report: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a finished run that a forecast predicts too, by the same names."""
    rounds = report["rounds"]
    virtual = [each.get("simulated_seconds") for each in rounds]
    seconds = sum(each["seconds"] for each in rounds)
    selected = sum(each["selected"] for each in rounds)
    answered = selected - sum(each["silent"] for each in rounds)
    return {
        "rounds": len(rounds),
        "clients": report["clients"],
        "clients_per_round": selected / len(rounds),
        "client_bytes_down": report["bytes_down"] / max(selected, 1),
        "client_bytes_up": report["bytes_up"] / max(answered, 1),
        "round_seconds": seconds / len(rounds),
        "rounds_seconds": seconds,
        "bytes_up": report["bytes_up"],
        "bytes_down": report["bytes_down"],
        **({} if None in virtual else {"simulated_seconds": sum(virtual)}),
    }
