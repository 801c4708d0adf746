"""Progress of a run or a job on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from coordinator.commands.output import format_metric, plain_console

if TYPE_CHECKING:
    # Only for type checking: the import takes longer than a short run.
    from coordinator.rounds.records import RoundRecord


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
        if record.rejected:
            figures += f"  rejected {record.rejected}"
        if self._console.is_terminal and self._task is not None:
            self._bar.update(self._task, completed=record.round, figures=figures)
        else:
            self.print(f"round {record.round}/{self._rounds}  {figures}  {record.seconds:.2f} s")
