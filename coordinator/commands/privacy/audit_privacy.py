"""`fedloop audit-privacy`: what updates of one's own setting leak, and what the defences change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType

from coordinator.commands.options import DataDir, ExperimentFile, Json, RunFolder, Sets
from coordinator.commands.output import RichProgress, format_metric, make_table, print_summary
from coordinator.errors import UserError
from coordinator.output_folders import default_folder

Client = Annotated[
    str | None,
    typer.Option("--client", help="Client that is attacked. Default: the first one.", metavar="NAME"),
]
Rows = Annotated[
    int,
    typer.Option("--rows", min=1, max=256, help="Rows of the client that are attacked.", show_default=True),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        min=2,
        help="Attack the sum of so many clients, as secure aggregation shows it. Default: as [privacy] says.",
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-norm",
        min=1e-12,
        help="Clip each update to this L2 norm. Default: as [privacy] says.",
        metavar="NORM",
    ),
]
NoiseMultiplier = Annotated[
    float | None,
    typer.Option(
        "--noise-multiplier",
        min=0.0,
        help="Standard deviation of the noise on a round's sum, as a multiple of --clip-norm. Default: as [privacy] says.",
    ),
]
Iterations = Annotated[
    int,
    typer.Option(
        "--iterations", min=1, max=100_000, help="Of the attack by optimisation on a model that begins with no dense layer.",
        show_default=True,
    ),
]  # fmt: skip


Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="Finished simulation whose experiment and model are attacked. Default: the experiment is simulated first.",
        metavar="DIR",
    ),
]
UpdatesOnly = Annotated[
    bool, typer.Option("--updates-only", help="Attack updates and no model: nothing is trained.")
]

Canaries = Annotated[
    int,
    typer.Option(
        "--canaries",
        min=10,
        max=10_000,
        help="Invented clients that bound epsilon from below, if [privacy] claims one.",
        show_default=True,
    ),
]


def audit_privacy(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    out: RunFolder = None,
    client: Client = None,
    rows: Rows = 8,
    group_size: GroupSize = None,
    clip_norm: ClipNorm = None,
    noise_multiplier: NoiseMultiplier = None,
    iterations: Iterations = 200,
    run: Run = None,
    updates_only: UpdatesOnly = False,
    canaries: Canaries = 1000,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Attack an experiment of your own: what its updates and its model leak, and what the defences change.

    Writes audit.json and, of images and tables, reconstructions.png. docs/privacy-audit.md explains the figures.
    """
    from coordinator.experiments import experiment as experiments
    from coordinator.privacy.audit import audit
    from coordinator.privacy.audit.defences import Overrides
    from coordinator.runs.simulation import Environment

    if run is not None and (experiment is not None or sets or updates_only):
        raise UserError(
            "--run takes the experiment from its folder: omit EXPERIMENT, --set and --updates-only"
        )
    loaded = experiments.load(experiment if run is None else run / "experiment.toml", sets or [])
    folder = out or default_folder(f"{loaded.name}-audit")
    overrides = Overrides(group_size, clip_norm, noise_multiplier)
    options = audit.Options(overrides, client, rows, iterations, run, updates_only, canaries)
    with RichProgress() as progress:
        environment = Environment(data_dir=data_dir, progress=progress)
        document = audit.audit(loaded, folder, environment, options)
    print_summary({"out": str(folder), **document}, _summary(document, str(folder)), as_json=as_json)


def _summary(document: Mapping[str, Any], folder: str) -> Group:
    parts: list[RenderableType] = [
        f"Updates of client {document['client']}, which has {document['client_rows']} rows",
        "",
        _updates_table(document["updates"]),
        "",
        *_explanations(document["updates"]),
        *_shown_rows(document["updates"]),
        *_membership(document.get("membership")),
        *_canaries(document["canaries"]),
        "",
        f"audit.json{' and reconstructions.png' if document['updates'][0]['method'] != 'embedding' else ''} in {folder}/",
    ]
    return Group(*parts)


def _updates_table(updates: Sequence[Mapping[str, Any]]) -> RenderableType:
    measure = updates[0]["measure"]
    right = (measure, "guess", "labels", "guess ")
    table = make_table(
        "update of",
        "defence",
        "attacker",
        "attack",
        *right,
        "rows" if measure != "tokens" else "found",
        right=right,
    )
    for each in updates:
        table.add_row(
            each["attacked"],
            f"{'what if: ' * each['is_supposed']}{each['defence']}",
            each["attacker"],
            each["method"],
            *(format_metric(each[name], 3) for name in ("similarity", "guess", "labels", "labels_guess")),
            each["verdict"],
        )
    return table


def _explanations(updates: Sequence[Mapping[str, Any]]) -> list[str]:
    measure = updates[0]["measure"]
    if measure == "tokens":
        return [
            "tokens: share of tokens that the update tells to have occurred or not, mean of both; 1 is exact, 0.5 a guess"
        ]
    return [
        f"{measure}: similarity of the best reconstruction to a row behind the update, 1 is exact; guess: of the mean row or of other rows",
        "labels: how much of the labels' distribution the update tells; guess: that of all rows",
    ]


def _shown_rows(updates: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """The first row of the plain update in its natural form, beside its reconstruction."""
    first = updates[0]
    if first.get("tokens"):
        return ["", f"tokens of the first row, from the plain update: {' '.join(first['tokens'])}"]
    if not first.get("examples"):
        return []
    pair = first["examples"][0]
    table = make_table("column", "row", "from its plain update")
    for name, cell in pair["row"].items():
        table.add_row(name, cell, pair["reconstruction"][name])
    return ["", table]


def _membership(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    low = f"{found['low_rate']:.0%}"
    told = (
        "the losses tell who was trained on"
        if found["is_seen"]
        else "no more than chance explains: the losses do not tell who was trained on"
    )
    return [
        "",
        f"Final model: losses of {found['members']} rows that it was trained on, and of {found['others']} that it was not",
        f"  AUC {found['auc']:.3f} (a guess: 0.5 ± {found['auc_margin']:.3f}), advantage {found['advantage']:.3f} (a guess: 0)",
        f"  {found['low_rate_tpr']:.1%} of members found at {low} false alarms (a guess: {low})",
        f"  {told}",
    ]


def _canaries(found: Mapping[str, Any]) -> list[str]:
    if (why := found.get("why_not")) is not None:
        return ["", f"Canaries: none; {why}"]
    return [
        "",
        f"Canaries: from {found['rounds']} released sums it was told which of {found['canaries']} invented clients took part",
        f"  epsilon is at least {found['lower']:.2f}, with {found['confidence']:.0%} confidence; the accountant claims at most "
        f"{found['claimed']:.2f} (delta {found['delta']:g})",
        f"  {_verdict(found)}",
    ]


def _verdict(found: Mapping[str, Any]) -> str:
    if found["is_refuted"]:
        return "THE CLAIM IS WRONG: these sums tell more than the accountant says; report it, and do not rely on this epsilon"
    if found["claimed"] >= found["strongest"]:
        return f"not refuted, but {found['canaries']} canaries cannot refute a claim above {found['strongest']:.2f}; --canaries takes more"
    return "the claim is not refuted"
