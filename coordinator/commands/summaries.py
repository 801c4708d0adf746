"""Summaries that the commands print when they are done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group

from coordinator.commands.output import (
    figure_of,
    format_bytes,
    format_errors,
    format_metric,
    format_traffic,
    make_table,
    print_summary,
)
from coordinator.commands.trial_summary import describe_trials
from coordinator.errors import NothingLearnt
from coordinator.short_ids import short_id

_MAX_ROWS = 10
_SHOWN_ERROR = 0.0005
"""A smaller error does not show in figures of three decimals."""


def run_summary(report: dict[str, Any], folder: Path | None) -> str:
    """The result of a run: accuracy, clients, traffic, rejections. `folder`: where its files are, if they are here."""
    final = report["final"]
    runtimes = ", ".join(f"{count} {name}" for name, count in report["runtimes"].items())
    lines = [
        _scores(final) + f" after {_rounds(report)}",
        *_figure_lines(report),
        f"{report['clients']} client{'s' * (report['clients'] != 1)}: {runtimes};  {format_traffic(report)}",
    ]
    if rejected := report["rejections"]:
        lines.append("rejected: " + ", ".join(f"{count} {reason}" for reason, count in rejected.items()))
    unchanged = sum(row["accepted"] == 0 for row in report["rounds"])
    if unchanged and "privacy" not in report:  # where also a round without updates adds noise
        lines.append(
            f"{unchanged} of {len(report['rounds'])} rounds changed nothing: too few updates by the deadline"
        )
    files = f"  report, curves and model in {folder}/" if folder is not None else ""
    lines.append(f"model {final['model_sha256'][:16]}…{files}")
    return "\n".join(lines)


def show_report(report: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    """Prints the result of a run on standard output.

    Raises:
        NothingLearnt: no round changed the model; with the reasons, from the events in `folder`.
    """
    print_summary({"out": str(folder), **report}, run_summary(report, folder), as_json=as_json)
    from coordinator.reports import folder_state  # imports what `fedloop --help` does not need

    rounds = report["rounds"]
    if folder_state.learnt_nothing(report):
        silent = sum(row["silent"] for row in rounds)
        on_devices = "; why a device sent none: fedloop device why DEVICE" if "run" in report else ""
        raise NothingLearnt(
            "\n  ".join(
                [
                    f"no round changed the model: of {sum(row['selected'] for row in rounds)} clients selected, {silent} sent no "
                    f"update and {sum(row['rejected'] for row in rounds)} were rejected; the model is the initial one{on_devices}",
                    *_unused_clients(folder_state.iterate_events(folder)),
                ]
            )
        )


def _unused_clients(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """The last reason why each client's update was not used, of some clients, and what rounds missed besides."""
    why: dict[str, str] = {}
    for event in events:
        client, kind = event.get("client", event.get("device")), event["event"]
        reason = f"{event.get('words') or event.get('reason')}, in round {event.get('round')}"
        if client is not None and kind in ("client_silent", "update_rejected", "update_excluded"):
            why[client] = f"{short_id(client) if 'device' in event else client}: {reason}"
        elif kind == "quorum_missed":
            why["quorum"] = (
                f"round {event['round']} got {event['accepted']} updates that could be used, federation.min_updates = "
                f"{event['min_updates']}"
            )
        elif kind == "relay_absent":
            why[f"relay {client}"] = f"{event['updates']} updates were not used: {reason}"
        elif kind in ("relays_incomplete", "groups_incomplete"):
            why["relays"] = reason
        elif kind == "model_not_finite":
            why["model"] = (
                f"the updates of round {event['round']}, each finite, give a model that is not ({event['tensor']})"
            )
    more = len(why) - _MAX_ROWS
    return [*list(why.values())[:_MAX_ROWS], *([f"and {more} more: events.jsonl"] if more > 0 else [])]


def pretraining_summary(report: dict[str, Any], folder: Path) -> str:
    """The result of a pretraining: accuracy, size, plan, time."""
    from coordinator.datacenter.pretrain_report import describe_validation

    final = report["final"]
    return "\n".join(
        [
            f"{_quality(final)}, test loss {final['test_loss']:.4f} on "
            f"{report['data']['rows']['test']} held-out rows after {report['steps']} steps",
            f"{final['parameters']:,} parameters, {'plan ' + report['plan'] if report['plan'] else 'parameter server'}, {report['processes']} process{'es' * (report['processes'] > 1)}, {report['about']['seconds']:.1f} s",
            *([describe_validation(report["validation"])] if "validation" in report else []),
            f"model {final['model_sha256'][:16]}…  report, curve and model in {folder}/",
            *(f"{name}: {value}" for name, value in (report.get("profile") or {}).items()),
        ]
    )


def _quality(final: Mapping[str, Any]) -> str:
    """The figure of a pretrained model; of quantities R2, and the errors in their own unit."""
    errors = final.get("metrics")
    return format_errors(errors) if errors else f"test accuracy {final['test_accuracy']:.4f}"


def plan_summary(result: dict[str, Any]) -> Group:
    """The best plans with predicted time and memory, and why the first one is best."""
    costs = ("ms a step", "predicted", "measured", "memory")
    table = make_table("plan", *costs, right=costs)
    for row in result["ranking"][:_MAX_ROWS]:
        times = (row["seconds"], row["predicted"], row["measured"])
        milliseconds = ("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times)
        count = row["processes"]
        fewer = f" (on {count} process{'es' * (count > 1)} only)" if count < result["processes"] else ""
        table.add_row(f"{row['plan']}{fewer}", *milliseconds, format_bytes(row["memory_bytes"]))
    more = len(result["ranking"]) - _MAX_ROWS
    rest = [f"and {more} slower ones"] if more > 0 else []
    refused = [f"{len(result['refused'])} plans refused"] if result["refused"] else []
    return Group(table, *rest, *refused, "", *result["explanation"])


def tuning_summary(result: dict[str, Any]) -> Group:
    """The best options, each with the loss of its longest training, and how to use the first."""
    headings = ("lr", "warmup", "batch", "steps", "loss")
    table = make_table(*headings, right=headings)
    longest = {row["candidate"]: row for row in sorted(result["table"], key=lambda row: row["round"])}
    ranked = sorted(
        longest.values(), key=lambda row: (-row["round"], row["loss"] is None, row["loss"] or 0.0)
    )
    for row in ranked[:_MAX_ROWS]:
        loss = "not finite" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(f"{row['lr']:.3g}", str(row["warmup"]), str(row["batch_size"]), str(row["steps"]), loss)
    best = result["best"]
    use = " ".join(
        f"--set train.{key}={best[key]:.4g}" if key == "lr" else f"--set train.{key}={best[key]}"
        for key in ("lr", "warmup", "batch_size")
    )
    return Group(table, "", f"use: {use}")


def compression_summary(report: dict[str, Any], folder: Path) -> Group:
    """Cost and accuracy of a model before and after every compression step."""
    figure, title = figure_of(report["source"])
    costs = (title, "nonzero", "MACs", "bytes", "zipped", "latency")
    table = make_table("step", "", *costs, right=costs)
    for row in (report["source"], *report["steps"]):
        table.add_row(
            f"{row['step']} {row['kind']}" if row["step"] else row["kind"],
            row["model"] if row["precision"] == "float32" else row["precision"],
            format_metric(row[figure], 4),
            f"{row['nonzero']:,}",
            f"{row['macs']:,}",
            f"{row['bytes']:,}",
            f"{row['compressed_bytes']:,}",
            "-" if row["latency_us"] is None else f"{row['latency_us']:.1f} us",
        )
    measured = [
        line
        for row in report["steps"]
        if "measured" in row["facts"]
        for line in _precision_lines(row["facts"]["measured"])
    ]
    packed = [row["facts"]["saved"] for row in report["steps"] if "saved" in row["facts"]]
    notes = [f"{title} on {report['test_rows']} {report['scored']}", *measured, *packed, *report["notices"]]
    return Group(table, "", *notes, f"files, report and pareto.png in {folder}/")


def _precision_lines(measured: Mapping[str, Any]) -> list[str]:
    figure, title = figure_of(measured["tried"][0])
    lines = [f"chosen by the least bytes times latency, with {title} on {measured['rows']} training rows:"]
    for each in measured["tried"]:
        figures = f"{each['bytes']:,} bytes, {each['latency_us']:.1f} us, {title} {each[figure]:.4f}"
        parts = [figures] * bool(each["bytes"]) + [each["refused"]] * bool(each["refused"])
        lines.append(f"  {each['precision']}: {'; '.join(parts)}")
    return lines


def search_summary(report: dict[str, Any], folder: Path) -> Group:
    """Every pipeline that was tried, which one was chosen and why, and its result."""
    search = report["search"]
    figure, title = figure_of(search["source"])
    costs = (title, "bytes", "memory", "latency")
    table = make_table("pipeline", "", title, "bytes", "memory", "", "latency", "", right=costs)
    refused: list[str] = []
    for row in search["candidates"]:
        if "refused" in row:
            table.add_row(row["name"], "refused")
            refused.append(f"{row['name']} refused: {row['refused']}")
            continue
        misses = ", ".join(row["missed"])
        table.add_row(
            row["name"] + (" *" if row["front"] else ""),
            "few epochs" if row["rung"] == "short" else row["precision"],
            f"{row[figure]:.4f}",
            f"{row['bytes']:,}",
            f"{row['memory_bytes']:,}",
            row["runtime"],
            f"{row['latency_us']:.1f} us",
            "chosen" if row["name"] == search["chosen"] else f"misses {misses}" if misses else "fits",
        )
    notes = [*refused, f"{title} on {search['rows']} rows for the choice; * Pareto-optimal"]
    if search["chosen"] is None:
        notes.append(f"none fits {_bounds(search['budget'], title)}; {_nearest(search)}")
    else:
        notes += [
            f"chosen: {search['chosen']}, the smallest of those that fit {_bounds(search['budget'], title)} and are as good as "
            "the best of them within a standard error",
            *_chosen_result(report),
        ]
    return Group(table, "", *notes, f"all candidates and pareto.png in {folder / 'search'}/")


def _bounds(budget: Mapping[str, Any], title: str) -> str:
    bounds = [f"{title} >= {budget['accuracy']:.4f}"]
    bounds += [f"memory <= {budget['memory_bytes']:,} bytes"] if budget["memory_bytes"] else []
    bounds += [f"size <= {budget['size_bytes']:,} bytes"] if budget["size_bytes"] else []
    bounds += [f"latency <= {budget['latency_us']:,.0f} us"] if budget["latency_us"] else []
    return ", ".join(bounds)


def _nearest(search: Mapping[str, Any]) -> str:
    for row in search["candidates"]:
        if row["name"] == search["nearest"]:
            by = " and ".join(f"{name} by {100 * share:.1f} %" for name, share in row["missed"].items())
            return f"the nearest is {row['name']}, which misses {by}"
    return "every pipeline was refused"


def _chosen_result(report: Mapping[str, Any]) -> list[str]:
    """The result of the chosen pipeline on rows that had no part in the choice."""
    final, facts = report["final"], report["steps"][-1]["facts"]
    figure, title = figure_of(final)
    result = (
        f"{title} {final[figure]:.4f} on {report['test_rows']} other held-out rows, {final['bytes']:,} bytes"
    )
    if "arena_bytes" in facts:
        result += (
            f"; in tflite-micro {facts[f'micro_{figure}']:.4f}, in an arena of {facts['arena_bytes']:,} bytes"
        )
    below = final[figure] < report["search"]["budget"]["accuracy"]
    return [result] + (["this is below the bound; a tighter --accuracy leaves more room"] if below else [])


def _scores(final: dict[str, Any]) -> str:
    if "r2" in (final.get("metrics") or {}):
        return f"{format_errors(final['metrics'])} on {final['test_rows']} held-out rows"
    if final["test_accuracy"] is None and final["test_loss"] is not None:
        return f"test loss {final['test_loss']:.4f} on {final['test_rows']} held-out rows"
    if final["test_accuracy"] is None:
        return "not scored: the coordinator has no rows of its own and devices.evaluate_every is 0;"
    loss = "not finite" if final["test_loss"] is None else f"{final['test_loss']:.4f}"
    return (
        f"test accuracy {final['test_accuracy']:.4f}, test loss {loss} on {final['test_rows']} held-out rows"
    )


def _rounds(report: Mapping[str, Any]) -> str:
    """How many rounds there were, and whose model is kept if it is not the last one's."""
    final, taken = report["final"], len(report["rounds"])
    text = f"{taken} round{'s' * (taken != 1)}"
    if final.get("stopped_early"):
        text += ", stopped early"
    return text + (f"; the model of round {final['round']}" if final.get("round", taken) != taken else "")


def _figure_lines(report: Mapping[str, Any]) -> list[str]:
    """AUC and the like, the site with the lowest accuracy, and the baselines; none for a report without them."""
    final, lines = report["final"], []
    metrics = final.get("metrics") or {}
    if "auc" in metrics:
        positive = metrics["positive"]
        of_positive = "" if positive is None else f" (positive: {positive})"
        shown = {"auc": "AUC", "balanced_accuracy": "balanced accuracy", "f1": "F1", "sensitivity": "sensitivity",
                 "specificity": "specificity", "ece": "calibration error"}  # fmt: skip
        figures = ", ".join(f"{name} {format_metric(metrics[key], 3)}" for key, name in shown.items())
        lines.append(figures + of_positive + _origin(metrics))
    elif metrics.get("perplexity") is not None:
        lines.append(f"perplexity {metrics['perplexity']:.2f}")
    if "r2" in metrics:
        return [*_regression_lines(report), *describe_trials(report)]
    if baselines := final.get("baselines"):
        lines.append(f"baselines: {_baselines(baselines)}")
    scored = {
        name: each for name, each in report.get("per_site", {}).items() if each["test_accuracy"] is not None
    }
    lines += describe_trials(report)
    if len(scored) > 1:
        name, worst = min(scored.items(), key=lambda item: item[1]["test_accuracy"])
        compared = f"; baselines: {_baselines(worst['baselines'])}" if "baselines" in worst else ""
        lines.append(
            f"lowest of {len(scored)} sites: {name}, accuracy {worst['test_accuracy']:.4f} on {worst['test_rows']} rows{compared}"
        )
    return lines


def _origin(metrics: Mapping[str, Any]) -> str:
    """Whose rows the figures are of, if devices counted them."""
    if "auc_error" not in metrics:
        return ""
    error = metrics["auc_error"]
    bound = f"; AUC to within {error:.2g}" if error is not None and error >= _SHOWN_ERROR else ""
    return f"; on {metrics['rows']} rows of {metrics['devices']} devices{bound}"


def _regression_lines(report: Mapping[str, Any]) -> list[str]:
    """The baselines, and the site with the largest error."""
    shown = {"mean": "mean of the training rows", "local": "trained alone"}
    baselines = report["final"].get("baselines", {})
    lines = [
        f"baseline, {name}: {format_errors(baselines[key])}"
        for key, name in shown.items()
        if key in baselines
    ]
    sites = {name: each["metrics"] for name, each in report.get("per_site", {}).items() if "metrics" in each}
    scored = {name: each for name, each in sites.items() if each["mae"] is not None}
    if len(scored) > 1:
        name, worst = max(scored.items(), key=lambda item: item[1]["mae"])
        lines.append(f"largest error of {len(scored)} sites: {name}, {format_errors(worst)}")
    return lines


def _baselines(baselines: Mapping[str, Any]) -> str:
    """Accuracies of the baselines."""
    parts = []
    if "majority" in baselines:
        parts.append(f"majority class {format_metric(baselines['majority']['test_accuracy'], 4)}")
    if "local" in baselines:
        parts.append(f"trained alone {format_metric(baselines['local']['test_accuracy'], 4)}")
    return ", ".join(parts)


def demo_summary(demo: Mapping[str, Any]) -> Group:
    """The demo's stages side by side, and where the files are."""
    table = make_table("stage", "accuracy", "bytes", "", right=("accuracy", "bytes"))
    for stage in demo["stages"]:
        table.add_row(stage["name"], f"{stage['accuracy']:.4f}", f"{stage['bytes']:,}", stage["detail"])
    runtimes = ", ".join(f"{count} {name}" for name, count in demo["runtimes"].items())
    return Group(
        "",
        table,
        "",
        f"accuracy on the same {demo['test_rows']} held-out rows throughout",
        f"clients: {runtimes};  {format_traffic(demo)}",
        f"report: {demo['report']}",
        f"curves: {Path(demo['report']).with_name('curves.png')}",
    )


def fleet_demo_summary(demo: Mapping[str, Any]) -> Group:
    """The fleet beside the simulation, and how its processes ended."""
    runtimes = ", ".join(f"{name} ({runtime})" for name, runtime in demo["runtimes"].items())
    of_fleet, of_simulation = demo["test_rows"]
    return Group(
        "",
        f"fleet       test accuracy {demo['fleet_accuracy']:.4f} on {of_fleet} held-out rows after {demo['rounds']} rounds",
        f"simulation  test accuracy {demo['simulated_accuracy']:.4f} on {of_simulation} held-out rows with the same shares",
        "",
        f"devices: {runtimes};  {format_traffic(demo)}",
        _endings(demo["stopped"]),
        f"report: {demo['report']}",
    )


def loop_demo_summary(demo: Mapping[str, Any]) -> Group:
    """Both turns of the cycle, the lineage, and how the processes ended."""
    lines = []
    for origin, turn in (("pretrained", demo["shipped"]), ("trained on devices", demo["learnt"])):
        on_devices = ""
        if turn["device_accuracy"] is not None and turn["before"] is not None:
            on_devices = (
                f"; on the devices, which share the held-out rows, on {turn['device_rows']} of them "
                f"{turn['device_accuracy']:.4f}, the release before {turn['before']:.4f}"
            )
        lines.append(
            f"digits:{turn['version']}  {origin}: {turn['bytes']:,} bytes, accuracy {turn['accuracy']:.4f} on "
            f"{turn['test_rows']} {turn['scored']}{on_devices}; rollout {turn['rollout']}"
        )
    lineage = demo["lineage"].rstrip()
    return Group("", *lines, "", lineage, "", _endings(demo["stopped"]), f"report: {demo['report']}")


def _endings(stopped: Mapping[str, int]) -> str:
    failed = {name: status for name, status in stopped.items() if status}
    return f"processes failed: {failed}" if failed else f"all {len(stopped)} processes ended cleanly"
