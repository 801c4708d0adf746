"""A run on the terminal: progress while it goes, a few lines when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    # What a coordinator serves with comes with them, and takes longer to import than a short run's own process works.
    from coordinator.demo import Demo
    from coordinator.demo_fleet import FleetDemo
    from coordinator.demo_loop import LoopDemo
    from coordinator.rounds.engine import RoundRecord


class RichProgress:
    """A progress bar on a terminal; one line a round where there is none, such as in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task: TaskID | None = None
        self._rounds = 0
        self._told = 0

    def __enter__(self) -> RichProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, words: str) -> None:
        self._console.print(Text(words + " …", style="dim"))

    def note(self, words: str) -> None:
        self._console.print(Text("  " + words, style="dim"), soft_wrap=True)

    def step(self, done: int, total: int) -> None:
        if self._task is None or self._bar.tasks[-1].finished:
            self._task = self._bar.add_task("epochs", total=total, figures="")
        self._bar.update(self._task, completed=done, total=total)

    def trained(self, line: Mapping[str, Any]) -> None:
        """A job's step or epoch; without a terminal, about ten lines in all."""
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
            step < self._told or self._told == 0 or step == steps or step >= self._told + steps / 10
        ):
            self._told = step
            self._console.print(f"{unit} {step}/{steps}  {figures}", highlight=False)

    def begin(self, rounds: int, done: int) -> None:
        self._rounds = rounds
        self._task = self._bar.add_task("rounds", total=rounds, completed=done, figures="")

    def round(self, record: RoundRecord) -> None:
        figures = (
            f"accuracy {_figure(record.test_accuracy, 4)}  test loss {_figure(record.test_loss, 3)}  "
            f"train loss {_figure(record.train_loss, 3)}"
        )
        if record.rejected:
            figures += f"  rejected {record.rejected}"
        if self._console.is_terminal and self._task is not None:
            self._bar.update(self._task, completed=record.round, figures=figures)
        else:
            self._console.print(
                f"round {record.round}/{self._rounds}  {figures}  {record.seconds:.2f} s", highlight=False
            )


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def closing_lines(report: dict[str, Any], folder: Path) -> str:
    """What a person wants to know at the end of a run."""
    final = report["final"]
    runtimes = ", ".join(f"{count} {name}" for name, count in report["runtimes"].items())
    lines = [
        _scored(final) + f" after {len(report['rounds'])} rounds",
        f"{report['clients']} clients: {runtimes};  {megabytes(report['bytes_up'])} up, "
        f"{megabytes(report['bytes_down'])} down",
    ]
    if report["rejections"]:
        lines.append(
            "rejected: " + ", ".join(f"{count} {reason}" for reason, count in report["rejections"].items())
        )
    unchanged = sum(row["accepted"] == 0 for row in report["rounds"])
    if unchanged:
        lines.append(
            f"{unchanged} of {len(report['rounds'])} rounds changed nothing: too few updates by the deadline"
        )
    lines.append(f"model {final['model_sha256'][:16]}…  report, curves and model in {folder}/")
    return "\n".join(lines)


def pretrained_lines(report: dict[str, Any], folder: Path) -> str:
    """What a person wants to know at the end of a pretraining."""
    final, profile = report["final"], report.get("profile")
    watched = [f"{name}: {value}" for name, value in profile.items()] if profile else []
    return "\n".join(
        [
            f"test accuracy {final['test_accuracy']:.4f}, test loss {final['test_loss']:.4f} on "
            f"{report['data']['rows']['test']} held-out rows after {report['steps']} steps",
            f"{final['parameters']:,} parameters, {'plan ' + report['plan'] if report['plan'] else 'parameter server'}, {report['processes']} process{'es' * (report['processes'] > 1)}, "
            f"{report['about']['seconds']:.1f} s",
            f"model {final['model_sha256'][:16]}…  report, curve and model in {folder}/",
            *watched,
        ]
    )


def plan_table(found: dict[str, Any], most: int = 10) -> Group:
    """The best plans with predicted time and memory, and why the first is first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("plan", "ms a step", "predicted", "measured", "memory"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for row in found["ranking"][:most]:
        times = (row["seconds"], row["predicted"], row["measured"])
        shown = ("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times)
        table.add_row(str(row["plan"]), *shown, megabytes(row["memory_bytes"]))
    more = len(found["ranking"]) - most
    rest = [f"and {more} slower ones"] if more > 0 else []
    refused = [f"{len(found['refused'])} plans refused"] if found["refused"] else []
    return Group(table, *rest, *refused, "", *found["explanation"])


def tuning_table(found: dict[str, Any], most: int = 10) -> Group:
    """The best options tried, each with its loss where it was trained longest, and how to use the first."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("lr", "warmup", "batch", "steps", "loss"):
        table.add_column(heading, justify="right")
    longest = {row["candidate"]: row for row in sorted(found["table"], key=lambda row: row["round"])}
    ranked = sorted(
        longest.values(),
        key=lambda row: (-row["round"], row["loss"] is None, row["loss"] or 0.0),
    )
    for row in ranked[:most]:
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(f"{row['lr']:.3g}", str(row["warmup"]), str(row["batch_size"]), str(row["steps"]), loss)
    best = found["best"]
    use = " ".join(
        f"--set train.{key}={best[key]:.4g}" if key == "lr" else f"--set train.{key}={best[key]}"
        for key in ("lr", "warmup", "batch_size")
    )
    return Group(table, "", f"use: {use}")


def compressed_table(report: dict[str, Any], folder: Path) -> Group:
    """What a model costs and what it is worth, before and after every step of its compression."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("step", "", "accuracy", "nonzero", "MACs", "bytes", "zipped", "latency"):
        table.add_column(heading, justify="left" if heading in ("step", "") else "right")
    for row in (report["source"], *report["steps"]):
        table.add_row(
            f"{row['step']} {row['kind']}" if row["step"] else row["kind"],
            row["model"] if row["precision"] == "float32" else row["precision"],
            _figure(row["accuracy"], 4),
            f"{row['nonzero']:,}",
            f"{row['macs']:,}",
            f"{row['bytes']:,}",
            f"{row['compressed_bytes']:,}",
            "-" if row["latency_us"] is None else f"{row['latency_us']:.1f} us",
        )
    return Group(table, "", f"files, report and pareto.png in {folder}/")


def searched_table(report: dict[str, Any], folder: Path) -> Group:
    """Every pipeline that was tried, which one was chosen and why, and what the chosen one came to."""
    found = report["search"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("pipeline", "", "accuracy", "bytes", "memory", "", "latency", ""):
        table.add_column(heading, justify="left" if heading in ("pipeline", "") else "right", no_wrap=True)
    refused: list[str] = []
    for row in found["candidates"]:
        if "refused" in row:
            table.add_row(row["name"], "refused")
            refused.append(f"{row['name']} refused: {row['refused']}")
            continue
        misses = ", ".join(row["missed"])
        table.add_row(
            row["name"] + (" *" if row["front"] else ""),
            "few epochs" if row["rung"] == "short" else row["precision"],
            f"{row['accuracy']:.4f}",
            f"{row['bytes']:,}",
            f"{row['memory_bytes']:,}",
            row["runtime"],
            f"{row['latency_us']:.1f} us",
            "chosen" if row["name"] == found["chosen"] else f"misses {misses}" if misses else "fits",
        )
    words = [
        *refused,
        f"accuracy on {found['rows']} rows to choose by; * no other one beats it in everything",
    ]
    if found["chosen"] is None:
        words.append(f"none fits {_bounds(found['budget'])}; {_nearest(found)}")
    else:
        words += [
            f"chosen: {found['chosen']}, the smallest of those that fit {_bounds(found['budget'])} and are as accurate as "
            "the best of them within a standard error",
            *_delivered(report),
        ]
    return Group(table, "", *words, f"all that was tried and pareto.png in {folder / 'search'}/")


def _bounds(budget: Mapping[str, Any]) -> str:
    bounds = [f"accuracy >= {budget['accuracy']:.4f}"]
    bounds += [f"memory <= {budget['memory_bytes']:,} bytes"] if budget["memory_bytes"] else []
    bounds += [f"size <= {budget['size_bytes']:,} bytes"] if budget["size_bytes"] else []
    bounds += [f"latency <= {budget['latency_us']:,.0f} us"] if budget["latency_us"] else []
    return ", ".join(bounds)


def _nearest(found: Mapping[str, Any]) -> str:
    for row in found["candidates"]:
        if row["name"] == found["nearest"]:
            by = " and ".join(f"{name} by {100 * share:.1f} %" for name, share in row["missed"].items())
            return f"the nearest is {row['name']}, which misses {by}"
    return "every pipeline was refused"


def _delivered(report: Mapping[str, Any]) -> list[str]:
    """What the chosen one came to on rows that had no part in the choice."""
    final, last = report["final"], report["steps"][-1]
    words = f"accuracy {final['accuracy']:.4f} on {report['test_rows']} other held-out rows, {final['bytes']:,} bytes"
    if "arena_bytes" in last["facts"]:
        facts = last["facts"]
        words += (
            f"; in tflite-micro {facts['micro_accuracy']:.4f}, in an arena of {facts['arena_bytes']:,} bytes"
        )
    below = final["accuracy"] < report["search"]["budget"]["accuracy"]
    return [words] + (
        ["on these it is below the bound; a tighter --accuracy leaves more room"] if below else []
    )


def _scored(final: dict[str, Any]) -> str:
    if final["test_accuracy"] is None:
        return "not scored: the coordinator has no rows of its own and devices.evaluate_every is 0;"
    loss = "not finite" if final["test_loss"] is None else f"{final['test_loss']:.4f}"
    return (
        f"test accuracy {final['test_accuracy']:.4f}, test loss {loss} on {final['test_rows']} held-out rows"
    )


def closing_table(demo: Demo) -> Group:
    """The demo's stages side by side, and where everything lies."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("stage", "accuracy", "bytes", ""):
        table.add_column(heading, justify="right" if heading in ("accuracy", "bytes") else "left")
    for stage in demo.stages:
        table.add_row(stage.name, f"{stage.accuracy:.4f}", f"{stage.bytes:,}", stage.detail)
    runtimes = ", ".join(f"{count} {name}" for name, count in demo.runtimes.items())
    return Group(
        "",
        table,
        "",
        f"clients: {runtimes};  {megabytes(demo.bytes_up)} up, {megabytes(demo.bytes_down)} down",
        f"report: {demo.report}",
        f"curves: {demo.curves}",
    )


def fleet_lines(demo: FleetDemo) -> Group:
    """The fleet beside the simulation, and how its processes ended."""
    runtimes = ", ".join(f"{name} ({runtime})" for name, runtime in demo.runtimes.items())
    wrong = {name: status for name, status in demo.stopped.items() if status}
    return Group(
        "",
        f"fleet       test accuracy {demo.fleet_accuracy:.4f} after {demo.rounds} rounds",
        f"simulation  test accuracy {demo.simulated_accuracy:.4f} with the same shares",
        "",
        f"devices: {runtimes};  {megabytes(demo.bytes_up)} up, {megabytes(demo.bytes_down)} down",
        f"all {len(demo.stopped)} processes ended well" if not wrong else f"ended badly: {wrong}",
        f"report: {demo.report}",
    )


def loop_lines(demo: LoopDemo) -> Group:
    """Both turns of the circle, what came from what, and how the processes ended."""
    lines = []
    for what, turn in (("pretrained", demo.shipped), ("trained on devices", demo.learnt)):
        there = ""
        if turn.device_accuracy is not None and turn.before is not None:
            there = (
                f"; on the devices' own rows {turn.device_accuracy:.4f}, the release before {turn.before:.4f}"
            )
        lines.append(
            f"digits:{turn.version}  {what}: {turn.bytes:,} bytes, accuracy {turn.accuracy:.4f}{there}; rollout {turn.rollout}"
        )
    wrong = {name: status for name, status in demo.stopped.items() if status}
    return Group(
        "",
        *lines,
        "",
        demo.lineage.rstrip(),
        "",
        f"all {len(demo.stopped)} processes ended well" if not wrong else f"ended badly: {wrong}",
        f"report: {demo.report}",
    )


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e6:.2f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
