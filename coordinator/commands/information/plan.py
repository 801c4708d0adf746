"""`fedloop plan`: what a run will take, before it begins, and afterwards beside what it took."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType

from coordinator.commands.options import DataDir, Json, Sets
from coordinator.commands.output import RichProgress, format_bytes, make_table, print_summary
from coordinator.errors import UserError

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment
    from coordinator.reports.progress import Progress


def plan(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            help="Experiment file (TOML), or the folder of a finished simulation; without one, the defaults: digits.",
            metavar="[EXPERIMENT.toml | RUN]",
        ),
    ] = None,
    sets: Sets = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Predict what a simulation will take: time, memory, and bytes of each client and in total.

    Checks the whole experiment, simulates its first four rounds, keeps nothing of them, and extends what they took to the whole run. For the folder
    of a finished run it shows the prediction beside what happened.
    """
    from coordinator.experiments import experiment as experiments
    from coordinator.runs import simulation
    from coordinator.runs.forecast import calibration, forecast
    from coordinator.runs.privacy import plan as privacy

    report = None
    if experiment is not None and experiment.is_dir():
        report = _read_report(experiment)
        experiment = experiment / "experiment.toml"
    loaded = experiments.load(experiment, sets or [])
    with RichProgress() as progress:

        def simulate(short: Experiment, out: Path, shown: Progress) -> Mapping[str, Any]:
            return simulation.simulate(short, out, simulation.Environment(data_dir=data_dir, progress=shown))

        measured = calibration.calibrate(loaded, simulate, progress)
    predicted = forecast.predict(loaded, measured).document()
    document: dict[str, Any] = {"experiment": loaded.name, "predicted": predicted}
    if spent := privacy.foresee(loaded, predicted["clients"], measured.sizes):
        document["privacy"] = spent
    if report is not None:
        document["happened"] = forecast.happened(report)
    table = _table(predicted, document.get("happened"))
    print_summary(document, Group(table, *_privacy_lines(spent)), as_json=as_json)


def _read_report(folder: Path) -> dict[str, Any]:
    path = folder / "report.json"
    try:
        report: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: has no report.json; expected the folder of a finished simulation"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if "run" in report:
        raise UserError(f"{folder}: is a run on devices, whose time depends on them; expected a simulation")
    return report


_LINES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "rounds": ("rounds", str),
    "clients": ("clients", str),
    "clients_per_round": ("clients in a round", lambda value: f"{value:.1f}".removesuffix(".0")),
    "client_bytes_down": ("a client receives in a round", format_bytes),
    "client_bytes_up": ("a client sends in a round", format_bytes),
    "bytes_down": ("all clients receive", format_bytes),
    "bytes_up": ("all clients send", format_bytes),
    "round_seconds": ("a round", lambda value: _duration(value)),
    "rounds_seconds": ("all rounds", lambda value: _duration(value)),
    "alone_seconds": ("training clients alone, to compare", lambda value: _duration(value)),
    "seconds": ("the whole run", lambda value: _duration(value)),
    "simulated_seconds": ("all rounds in virtual time", lambda value: _duration(value)),
    "memory_bytes": ("memory of all processes", format_bytes),
}
"""By figure: how the table calls and shows it."""


def _table(predicted: Mapping[str, Any], happened: Mapping[str, Any] | None) -> RenderableType:
    columns = ["predicted"] if happened is None else ["predicted", "happened"]
    table = make_table("", *columns, right=columns)
    for key, (name, show) in _LINES.items():
        value = predicted[key]
        if value is None or (key == "alone_seconds" and value == 0):
            continue
        row = [name, show(value)]
        if happened is not None:
            row.append(show(happened[key]) if key in happened else "not recorded")
        table.add_row(*row)
    return table


def _privacy_lines(spent: Mapping[str, Any]) -> list[str]:
    """What the run will spend of its privacy budget, if it has a mechanism."""
    if not spent:
        return []
    lines = [f"privacy: noise multiplier {spent['noise_multiplier']:g}; {spent['in_words']}"]
    if (within := spent["rounds_within_budget"]) < (rounds := len(spent["epsilon"])):
        lines.append(f"privacy.budget = {spent['budget']:g} ends the run after {within} of {rounds} rounds")
    return lines


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
