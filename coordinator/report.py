"""What a run leaves in its folder: `rounds.csv` as it goes, `report.json`, `curves.png` and the model at the end."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coordinator import json_values
from coordinator.experiment import Experiment
from coordinator.fleets.simulated import SimulatedClient
from coordinator.rounds.checkpoint import Committed
from coordinator.rounds.engine import RoundRecord, as_row
from coordinator.rounds.events import LineFile
from coordinator.simulation.evaluation import accuracy_by_group
from edge_client.files import write_durably
from edge_client.train.trainer import Evaluation
from edge_client.wire import arrays
from strategies.params import Tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = tuple(field.name for field in fields(RoundRecord))


def open_lines(out: Path, committed: Committed | None) -> dict[str, LineFile]:
    """The files written line by line, cut back to the committed round.

    A round's own line in each follows its commit and is kept. If the run was killed between the two, the one
    in `rounds.csv` is made from the checkpoint, whose `seconds` lacks only that last moment; the event is left
    to the caller.
    """
    names = ("rounds.csv", "events.jsonl")
    if committed is None:
        lines = {name: LineFile(out / name, keep_bytes=0) for name in names}
        lines["rounds.csv"].append(_csv_line(COLUMNS))
        return lines
    kept = {name: _line_after(out / name, committed.offsets[name]) for name in names}
    kept["rounds.csv"] = kept["rounds.csv"] or _csv_line(_cells(committed.record))
    lines = {name: LineFile(out / name, keep_bytes=committed.offsets[name]) for name in names}
    for name, line in kept.items():
        if line is not None:
            lines[name].append(line)
    return lines


def append_round(lines: LineFile, record: RoundRecord) -> None:
    """The line of a committed round."""
    lines.append(_csv_line(_cells(as_row(record))))


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """`rounds.csv` as the objects of `report.json`."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: json.loads(text) if text else None for name, text in row.items()}
            for row in csv.DictReader(file)
        ]


def read_start(path: Path) -> dict[str, Any]:
    """`test_loss` and `test_accuracy` of the model the run began with, from its first event."""
    with path.open(encoding="utf-8") as file:
        event = json.loads(file.readline())
    return {key: event[key] for key in ("test_loss", "test_accuracy")}


def write(
    out: Path,
    experiment: Experiment,
    found: Mapping[str, Any],
    clients: Sequence[SimulatedClient],
    params: Tensors,
    final: Evaluation,
    sites: npt.NDArray[np.int32] | None,
) -> dict[str, Any]:
    """Writes model, curves and report, the report last: where it is, the run is finished.

    `sites`: site index of each test row, or None where the data has none.
    """
    encoded = arrays.encode(params)
    write_durably(out / "model.safetensors", encoded)
    start, rounds = read_start(out / "events.jsonl"), read_rounds(out / "rounds.csv")
    document: dict[str, Any] = {
        "experiment": experiment.model_dump(mode="json", exclude_none=True),
        "data": {key: found[key] for key in ("fingerprint", "classes", "input_shape", "task", "preview")},
        "clients": len(clients),
        "runtimes": dict(sorted(Counter(client.runtime for client in clients).items())),
        "start": start,
        "rounds": rounds,
        **totals(rounds),
        "final": {
            "test_accuracy": final.accuracy,
            "test_loss": json_values.finite(final.loss),
            "test_rows": len(final.labels),
            "model_sha256": arrays.sha256(encoded),
        },
    }
    if sites is not None:
        document["per_site"] = _per_site(final, sites, found["site_names"])
    draw_curves(out / "curves.png", experiment.name, start, rounds)
    write_durably(out / "report.json", json_values.dumps(document, indent=2).encode())
    return document


def draw_curves(
    path: Path, title: str, start: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]
) -> None:
    """Loss and accuracy per round, with the spread of accuracy over clients. Round 0 is the model it began with.

    Figures that are None leave gaps.
    """
    # Figure and canvas directly: pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    numbers = [row["round"] for row in rounds]
    tested = [start, *rounds]
    trained = [row for row in rounds if row["train_loss"] is not None]

    def curve(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
        return [math.nan if row[key] is None else row[key] for row in rows]

    left.plot(
        [r["round"] for r in trained],
        [r["train_loss"] for r in trained],
        label="training (clients' mean)",
        color="#8a8a8a",
    )
    left.plot([0, *numbers], curve(tested, "test_loss"), label="test", color="#1f6feb")
    _dress(left, "loss (cross-entropy)", numbers)
    left.set_ylim(bottom=0)
    of_clients = [row for row in rounds if row["client_accuracy_median"] is not None]
    if of_clients:
        scored = [row["round"] for row in of_clients]
        low, high = curve(of_clients, "client_accuracy_min"), curve(of_clients, "client_accuracy_max")
        right.fill_between(
            scored, low, high, color="#1f6feb", alpha=0.15, lw=0, label="clients, minimum to maximum"
        )
        middle = curve(of_clients, "client_accuracy_median")
        right.plot(scored, middle, color="#1f6feb", ls=":", label="clients, median")
    right.plot([0, *numbers], curve(tested, "test_accuracy"), color="#1f6feb", label="all test rows")
    _dress(right, "test accuracy", numbers)
    right.set_ylim(0, 1.01)
    last = rounds[-1]["test_accuracy"]
    if last is not None:
        right.annotate(
            f"{last:.3f}", (numbers[-1], last), xytext=(-4, -14), textcoords="offset points", ha="right"
        )
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    write_durably(path, buffer.getvalue())


def _dress(axes: Axes, label: str, numbers: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, max(numbers))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _per_site(final: Evaluation, sites: npt.NDArray[np.int32], names: Sequence[str]) -> dict[str, Any]:
    rows = np.bincount(sites, minlength=len(names))
    accuracy = accuracy_by_group(final, sites, names)
    return {
        name: {"test_rows": int(rows[i]), "test_accuracy": accuracy[name]} for i, name in enumerate(names)
    }


def totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rejections by reason and bytes, over all rounds."""
    rejections: Counter[str] = Counter()
    for row in rounds:
        rejections.update(row["rejections"])
    return {
        "rejections": dict(sorted(rejections.items())),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    return ["" if row[name] is None else json.dumps(row[name]) for name in COLUMNS]


def _csv_line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()


def _line_after(path: Path, offset: int) -> str | None:
    """The complete line at `offset`, if there is one."""
    with path.open("rb") as file:
        file.seek(offset)
        line = file.readline()
    return line[:-1].decode() if line.endswith(b"\n") else None
