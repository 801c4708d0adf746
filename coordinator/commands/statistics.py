"""`fedloop statistics`: what the sites' data is like, without any of its rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from coordinator.commands.options import ExperimentFile, Json, Sets
from coordinator.commands.output import format_metric, make_table, print_json, print_output
from coordinator.errors import RunInterrupted, UserError
from coordinator.operator.client import Coordinator, OperatorClient, connect
from coordinator.output_folders import begin, require_new
from edge_client.files import write_durably
from edge_client.wire.schema import from_document

REPORT_NAME = "statistics.json"

Out = Annotated[
    Path | None,
    typer.Option("--out", help=f"Folder for {REPORT_NAME}; new or empty. Default: none is written."),
]


def statistics(
    experiment: ExperimentFile = None,
    sets: Sets = None,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="Ask the devices of a running coordinator that have the data set.")
    ] = False,
    out: Out = None,
    schema_out: Annotated[
        Path | None,
        typer.Option(
            "--schema-out",
            help="With --fleet: file for the data schema that the devices' tables have in common, for data.schema of an experiment.",
        ),
    ] = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Show counts, means, drift and label balance of each site's training rows, without any single row.

    Over the clients of a simulation of EXPERIMENT.toml, or over devices. A count of fewer than 10 rows is never shown.
    """
    from coordinator.experiments import experiment as experiments
    from coordinator.runs.simulated_statistics import simulate_statistics

    if out is not None:
        require_new(out)
    _require_new_file(schema_out, fleet=fleet)
    notices: list[str] = []
    if fleet:
        document = experiments.read_document(experiment, sets or [], "devices")
        client = connect(coordinator)
        run, report = _ask_devices(client, document)
        if schema_out is not None:
            notices = _write_schema(client, run, schema_out, is_quantity=report["quantity"] is not None)
    else:
        report = simulate_statistics(experiments.load(experiment, sets or []))
    _show(report, out, notices, as_json=as_json)


def _require_new_file(schema_out: Path | None, *, fleet: bool) -> None:
    if schema_out is None:
        return
    if not fleet:
        raise UserError(
            f"--schema-out {schema_out}: is for the tables of devices, with --fleet; `fedloop simulate` writes the schema.json of its "
            "own table"
        )
    if schema_out.exists() or not schema_out.absolute().parent.is_dir():
        problem = "exists already" if schema_out.exists() else "its folder does not exist"
        raise UserError(f"--schema-out {schema_out}: {problem}; name a new file")


def _write_schema(client: OperatorClient, run: str, file: Path, *, is_quantity: bool) -> list[str]:
    """Writes the schema that the devices' tables have in common. Returns notices."""
    proposed = client.get(f"/statistics/{run}/schema")
    write_durably(file, from_document(proposed["schema"], "schema").to_json().encode())
    task = " --set data.task=regression" if is_quantity else ""
    return [
        *proposed["notices"],
        f"schema in {file}; read it, then train with --set data.schema={file}{task}",
    ]


def _ask_devices(client: OperatorClient, document: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The id and the report of a statistics round over devices. Ctrl-C cancels it."""
    from coordinator.operator.run_follower import ENDS, events_of

    run = client.post("/statistics", {"experiment": document})["id"]
    try:
        next(event for event in events_of(client, run, time.sleep) if event["event"] in ENDS)
    except KeyboardInterrupt:
        client.post(f"/runs/{run}/cancel")
        raise RunInterrupted("the statistics round is cancelled") from None
    shown = client.get(f"/statistics/{run}")
    if shown["state"] != "finished":
        raise RunInterrupted(f"the statistics round has {shown['state']}: {shown['error']}")
    return run, shown["report"]


def _show(report: Mapping[str, Any], out: Path | None, notices: list[str], *, as_json: bool) -> None:
    if out is not None:
        begin(out, REPORT_NAME, json.dumps(report, indent=2) + "\n")
    if as_json:
        print_json(report)
        return
    print_output(Group(_site_table(report), "", _column_table(report), *_notes(report, out), *notices))


def _site_table(report: Mapping[str, Any]) -> Any:
    table = make_table(
        "site", "rows", "missing", "largest drift", "label drift", "labels", right=("rows", "missing")
    )
    for name, site in report["sites"].items():
        if site["rows"] is None:
            table.add_row(name, f"< {report['minimum_count']}", "-", "-", "-", "-")
            continue
        columns = site["columns"]
        drift = max(
            ((column["drift"], each) for each, column in columns.items() if column["drift"] is not None),
            default=None,
        )
        shown = "-" if drift is None else f"{drift[0]:.2f} {drift[1]}"
        missing = [column["missing"] for column in columns.values() if column["missing"] is not None]
        share = f"{sum(missing) / len(missing):.1%}" if missing else "-"
        labels = _labels(site, report["quantity"])
        table.add_row(name, f"{site['rows']:,}", share, shown, format_metric(site["label_drift"], 2), labels)
    pool = report["pooled"]
    table.add_row("all", f"{pool['rows']:,}", "", "", "", _labels(pool, report["quantity"]))
    return table


def _labels(site: Mapping[str, Any], quantity: str | None) -> str:
    """The shares of the largest classes, or mean and deviation of a quantity."""
    labels, rows = site["labels"], site["rows"]
    if quantity is not None:
        column = site["columns"].get(quantity, {})
        mean, spread = column.get("mean"), column.get("deviation")
        return "-" if mean is None else f"{mean:.4g} ± {spread:.4g}"
    parts = [f"{name} {count / rows:.0%}" for name, count in list(labels["classes"].items())[:6]]
    return ", ".join(parts + (["others"] if labels["other"] or len(labels["classes"]) > 6 else []))


def _column_table(report: Mapping[str, Any]) -> Any:
    table = make_table(
        "column", "values", "mean", "deviation", "drifts at", right=("values", "mean", "deviation")
    )
    for name, column in report["pooled"]["columns"].items():
        drifting = [
            f"{site} {each['columns'][name]['drift']:.2f}"
            for site, each in report["sites"].items()
            if (each["columns"].get(name, {}).get("drift") or 0) >= 0.1
        ]
        values = "-" if column["count"] is None else f"{column['count']:,}"
        if column["kind"] == "category":
            named = len(column.get("categories", ()))
            table.add_row(
                name, values, f"{named} {'category' if named == 1 else 'categories'}", "", ", ".join(drifting)
            )
        else:
            mean, spread = (column.get(key) for key in ("mean", "deviation"))
            shown = ["-" if value is None else f"{value:.4g}" for value in (mean, spread)]
            table.add_row(name, values, *shown, ", ".join(drifting))
    return table


def _notes(report: Mapping[str, Any], out: Path | None) -> Iterator[str]:
    for site, reason in report["silent"].items():
        yield f"{site} reported nothing: {reason}"
    yield "drift: population stability index against all sites; 0.1 is moderate, 0.25 large"
    if out is not None:
        yield f"all figures in {out / REPORT_NAME}"
