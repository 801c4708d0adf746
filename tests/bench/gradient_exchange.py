"""Coded exchange of gradients against float32: bytes of a step as the kernel counts them, seconds, final loss.

All codings train at the same time, a step of each in turn, on the transformer and the made-up language of the tests.
Over loopback bytes cost next to nothing, so seconds show what coding itself costs; bytes show what it saves
elsewhere.
"""

from __future__ import annotations

import statistics
from typing import Any

from tests.models.pretrain.markov import ENTROPY, LAST, Training
from tests.support import ranks

PROCESSES, STEPS = 2, 300
CODINGS = {
    "fp32": "",
    "fp16": ",grad_compression=fp16",
    "bf16": ",grad_compression=bf16",
    "powersgd": ",grad_compression=powersgd",
    "onebit": ",grad_compression=onebit",
    "local SGD, 8 steps": ",sync_every=8",
    "DiLoCo, 8 steps": ",sync_every=8,outer=nesterov",
}


def run() -> dict[str, Any]:
    """Per coding: bytes a step and rank, warm-up included, median seconds of a step, loss, and ratios to fp32."""
    plans = [f"dp={PROCESSES}{rest}" for rest in CODINGS.values()]
    found = ranks.run(PROCESSES, "tests.models.pretrain.markov:trained", plans, steps=STEPS)
    results: dict[str, Any] = {}
    plain = found[0][0]
    print(
        f"gradient exchange, {PROCESSES} processes, {plain.values:,} values, {STEPS} steps, first loss {plain.first:.3f}, "
        f"entropy {ENTROPY:.3f}; ring: {8 * (PROCESSES - 1) / PROCESSES * plain.values:,.0f} bytes a step"
    )
    for name, of_ranks in zip(CODINGS, zip(*found, strict=True), strict=True):
        results[name] = _figures(list(of_ranks), plain)
        print(f"  {name:>18}: " + ", ".join(f"{key} {value:,.4g}" for key, value in results[name].items()))
    return results


def _figures(of_ranks: list[Training], plain: Training) -> dict[str, float]:
    """Medians over steps, of the first rank; bytes of the rank that sends most."""
    sent = max(each.sent_bytes for each in of_ranks) / STEPS
    seconds = statistics.median(of_ranks[0].step_seconds)
    return {
        "bytes": sent,
        "bytes / fp32": sent / (plain.sent_bytes / STEPS),
        "seconds": seconds,
        "seconds / fp32": seconds / statistics.median(plain.step_seconds),
        f"loss of the last {LAST}": of_ranks[0].loss,
        "loss / fp32": of_ranks[0].loss / plain.loss,
    }
