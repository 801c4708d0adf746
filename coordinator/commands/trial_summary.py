"""The lines of a summary about what a simulation tried: device classes, fine-tuning by each client, privacy, and an attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_trials(report: Mapping[str, Any]) -> list[str]:
    """A line for each trial of a report; none if it has none."""
    lines = [
        f"{name}: {_count(each['clients'], 'client')} of {_model(each)}: {_score(each)}"
        for name, each in report.get("device_classes", {}).items()
    ]
    if server := report.get("server_data"):
        lines.append(f"server: {_count(server['rows'], 'row')} of its own")
    final = report["final"]
    for key, what in (
        ("personalised", "each client's own model"),
        ("fine_tuned", "fine-tuned by each client"),
    ):
        if f"{key}_loss" not in final:
            continue
        line = f"{what}: test loss {final[f'{key}_loss']}"
        if per_client := report.get("per_client"):
            gains = [each[f"{key}_accuracy"] - each["test_accuracy"] for each in per_client.values()]
            line = (
                f"{what}: test accuracy {final[f'{key}_accuracy']:.4f}; "
                f"{sum(gain > 0 for gain in gains)} of {len(gains)} clients gain, {sum(gain < 0 for gain in gains)} lose"
            )
        lines.append(line)
    if (personalised := report.get("personalised")) and personalised["local_tensors"]:
        lines.append(
            f"local to each client, and as at the start in the global model: {', '.join(personalised['local_tensors'])}"
        )
    for number, each in report.get("clusters", {}).items():
        accuracy = "" if each["test_accuracy"] is None else f", test accuracy {each['test_accuracy']:.4f}"
        lines.append(f"model {number}: {_count(each['clients'], 'client')}{accuracy}, in {each['file']}")
    if privacy := report.get("privacy"):
        lines.append(f"privacy: {privacy['in_words']}")
        if privacy["ended_by_budget"]:
            lines.append(
                f"the run ended because another round would spend more than privacy.budget = {privacy['budget']:g}"
            )
    if secure := report.get("secure_aggregation"):
        lines.append(f"secure aggregation: {secure['in_words']}")
    if attack := report.get("attack"):
        success = ""
        if attack["success"] is not None:
            success = f"; {attack['success']:.1%} of {attack['rows']} rows answered as it wants"
        lines.append(
            f"attack: {attack['name']} by {len(attack['clients'])} of {report['clients']} clients{success}"
        )
    return lines


def _model(each: Mapping[str, Any]) -> str:
    """What the clients of a device class train."""
    if "model" in each:
        return f"model {each['model']}, {each['params']:,} params"
    return f"width {each['width']:g}, {each['params']:,} params; its part of the model"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _score(scored: Mapping[str, Any]) -> str:
    """Accuracy, or the loss of a model that predicts quantities."""
    if "test_loss" not in scored:
        return "not scored"
    accuracy, loss = scored["test_accuracy"], scored["test_loss"]
    if accuracy is not None:
        return f"test accuracy {accuracy:.4f}"
    return "no finite test loss" if loss is None else f"test loss {loss:.4f}"


def serving_demo_summary(demo: Mapping[str, Any]) -> str:
    """What was served, compared and promoted, and what became of the requests meanwhile."""
    accuracy = demo["accuracy"]
    return "\n".join(
        [
            f"digits:{demo['champion']}  pretrained, champion at first: accuracy {accuracy['champion']:.4f}",
            f"digits:{demo['candidate']}  trained on devices, candidate, then champion: accuracy {accuracy['candidate']:.4f}",
            f"as a shadow the candidate gave the same class for {100 * demo['agreement']:.1f} % of {demo['shadowed_rows']:,.0f} rows",
            f"{demo['requests']:,} requests meanwhile, {demo['failed']} failed; median {demo['median_ms']:g} ms",
            f"report: {demo['report']}",
        ]
    )
