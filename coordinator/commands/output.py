"""Output that the commands share: JSON, tables, formats of values, and the progress of a run or a job."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from edge_client.wire.strict import printable

if TYPE_CHECKING:
    # Only for type checking: the import takes longer than a short run.
    from coordinator.rounds.records import RoundRecord

_PIPE_WIDTH = 2000
"""Characters a line for output that another program reads, so that nothing is cut."""


def print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def print_summary(document: Any, summary: RenderableType, *, as_json: bool) -> None:
    """Prints a document as JSON, or the summary of it."""
    if as_json:
        print_json(document)
    else:
        print_output(summary)


def print_output(shown: RenderableType) -> None:
    """Prints on standard output. Nothing is cut: long cells continue below, long lines are left to the terminal."""
    console = plain_console()
    if console.is_terminal:
        words = Measurement.get(console, console.options.update(width=_PIPE_WIDTH), shown).minimum
        console.width = max(console.width, words)
    else:
        console.width = _PIPE_WIDTH
    console.print(shown, soft_wrap=True)


def plain_console(*, stderr: bool = False) -> Console:
    """A console that prints text as it is: brackets are no markup, and `:key:` is no emoji."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def make_table(*columns: str, right: Collection[str] = ()) -> Table:
    """An empty table without borders. `right`: columns aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def format_time(text: str) -> str:
    """An ISO timestamp in UTC, to the minute."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_event(event: Mapping[str, Any]) -> str:
    """An event of a run or a job in one line: its time, its name and its values."""
    moment = str(event["time"])[:19].replace("T", " ")
    values = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in event.items()
        if key not in ("time", "event", "id", "run")
    )
    return printable(" ".join([moment, event["event"], *values]), 2000)


def format_bytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def format_metric(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def format_errors(figures: Mapping[str, Any]) -> str:
    """R2 and errors of a regression, in the labels' own unit."""
    mae, rmse = ("-" if figures[key] is None else f"{figures[key]:.4g}" for key in ("mae", "rmse"))
    return f"R2 {format_metric(figures['r2'], 4)}, MAE {mae}, RMSE {rmse}"


class RichProgress:
    """A progress bar on a terminal; elsewhere, such as in a log, one line a round."""

    def __init__(self) -> None:
        self._console = console = plain_console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._rounds = 0
        self._last_reported = 0

    def __enter__(self) -> RichProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def print(self, line: str | Text) -> None:
        self._console.print(line, soft_wrap=True)

    def stage(self, message: str) -> None:
        self.print(Text(message + " …", style="dim"))

    def note(self, message: str) -> None:
        self.print(Text("  " + message, style="dim"))

    def trained(self, line: Mapping[str, Any]) -> None:
        """Shows a job's step or epoch; without a terminal, about ten lines in all."""
        if "note" in line:
            self.note(str(line["note"]))
        unit = "step" if "steps" in line else "epoch"
        if f"{unit}s" not in line:
            return
        step, steps = line[unit], line[f"{unit}s"]
        figures = f"loss {line['loss']:.4f}" if line.get("loss") is not None else ""
        figures += f"  lr {line['lr']:.2e}" if "lr" in line else ""
        figures += f"  validation loss {line['validation_loss']:.4f}" if "validation_loss" in line else ""
        if self._console.is_terminal:
            if self._task is None or self._bar.tasks[-1].total != steps:
                self._task = self._bar.add_task(f"{unit}s", total=steps, figures="")
            self._bar.update(self._task, completed=step, figures=figures)
        elif figures and (
            step < self._last_reported
            or self._last_reported == 0
            or step == steps
            or step >= self._last_reported + steps / 10
        ):
            self._last_reported = step
            self.print(f"{unit} {step}/{steps}  {figures}")

    def begin(self, rounds: int, done: int) -> None:
        self._rounds = rounds
        self._task = self._bar.add_task("rounds", total=rounds, completed=done, figures="")

    def round(self, record: RoundRecord) -> None:
        figures = (
            f"accuracy {format_metric(record.test_accuracy, 4)}  test loss {format_metric(record.test_loss, 3)}  "
            f"train loss {format_metric(record.train_loss, 3)}"
        )
        if record.test_metric is not None:
            figures += f"  metric {format_metric(record.test_metric, 4)}"
        if record.rejected:
            figures += f"  rejected {record.rejected}"
        if self._console.is_terminal and self._task is not None:
            self._bar.update(self._task, completed=record.round, figures=figures)
        else:
            self.print(f"round {record.round}/{self._rounds}  {figures}  {record.seconds:.2f} s")


def figure_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """The figure by which models with these figures are compared: its key and its title."""
    from models.tasks import of_figures  # late: if another package shadows `models`, `import_guard` says so

    task = of_figures(row)
    return task.figure, task.title


def format_traffic(report: Mapping[str, Any]) -> str:
    """What the clients of a run sent and received, such as `0.21 MB up, 2.1 MB down`."""
    fewer = {
        way: f" ({saved['times_fewer']:g} times fewer than uncompressed)"
        for way in ("uplink", "downlink")
        if (saved := report.get(way))
    }
    up, down = format_bytes(report["bytes_up"]), format_bytes(report["bytes_down"])
    return f"{up} up{fewer.get('uplink', '')}, {down} down{fewer.get('downlink', '')}"
