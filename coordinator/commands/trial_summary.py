"""The lines of a summary about what a simulation tried: fine-tuning by each client, and an attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_trials(report: Mapping[str, Any]) -> list[str]:
    """A line for each trial of a report; none if it has none."""
    lines = []
    if per_client := report.get("per_client"):
        gains = [each["fine_tuned_accuracy"] - each["test_accuracy"] for each in per_client.values()]
        lines.append(
            f"fine-tuned by each client: test accuracy {report['final']['fine_tuned_accuracy']:.4f}; "
            f"{sum(gain > 0 for gain in gains)} of {len(gains)} clients gain, {sum(gain < 0 for gain in gains)} lose"
        )
    if attack := report.get("attack"):
        success = ""
        if attack["success"] is not None:
            success = f"; {attack['success']:.1%} of {attack['rows']} rows answered as it wants"
        lines.append(
            f"attack: {attack['name']} by {len(attack['clients'])} of {report['clients']} clients{success}"
        )
    return lines
