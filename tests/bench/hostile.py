"""Hostile devices in bulk: thousands of malformed requests and mutated results against a served coordinator.

    python -m tests.bench.hostile [CASES]        5,000 unless said

A pool of raw devices plays the fixed corpus and results mutated by seed, round after round; an honest raw device
closes each round. Prints cases a second, what they were answered with, and the coordinator's memory.
Then come those who have no certificate (`tests.bench.strangers`), and 500 uploads at once (`tests.bench.upload_storm`).
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_client.wire import device as wire
from tests.bench import strangers, upload_storm
from tests.support.arena import Arena, arena
from tests.support.device_client import RawDevice
from tests.support.hostile import Target, request_cases, result_cases, sent
from tests.support.hostile_results import mutated

POOL = 200
SEED = 7


def run(cases: int = 5000) -> dict[str, Any]:
    """Figures of all hostile devices and strangers; `failures` has the promises that do not hold."""
    found, uploads = {"cases": malformed(cases), **strangers.run()}, upload_storm.run()
    return {**found, "uploads": uploads, "failures": [*found.get("failures", []), *uploads["failures"]]}


def malformed(cases: int) -> dict[str, Any]:
    """Prints and returns: cases a second, memory in MB, and the statuses that came, of so many cases.

    Raises:
        AssertionError: one was accepted that should not be, or the coordinator failed.
    """
    with tempfile.TemporaryDirectory() as folder, arena(Path(folder)) as made:
        made.enrol(POOL + 2)
        before, statuses, seconds, left, number = None, Counter[int](), 0.0, cases, 0
        while left > 0:
            done, took = _round(made, min(left, cases), number, statuses)
            seconds, left, number = seconds + took, left - done, number + 1
            before = before or made.memory()
        after = made.memory()
        assert before is not None
        assert not made.failures(), made.failures()[:5]
        assert not any(status >= 500 for status in statuses)
        found = {
            "cases": cases - left,
            "cases_per_second": (cases - left) / seconds,
            "statuses": dict(sorted(statuses.items())),
            "megabytes_after_first_round": before.resident / 1e6,
            "megabytes_after_last_round": after.resident / 1e6,
            "megabytes_peak": after.peak / 1e6,
        }
    for key, value in found.items():
        sys.stdout.write(f"{key:32}{value:.1f}\n" if isinstance(value, float) else f"{key:32}{value}\n")
    return found


def _round(made: Arena, most: int, number: int, statuses: Counter[int]) -> tuple[int, float]:
    """One round of a new run: cases played, and how long they took."""
    *pool, attacker, honest = made.raw
    of = made.start_run(len(made.raw))
    for device in made.raw:
        device.check_in(made.checkin())
    offers = {device.id: device.task(made.checkin()) for device in made.raw}
    theirs = offers[honest.id]["task"]
    target = made.target(attacker, offers[attacker.id], honest, theirs)
    began = time.perf_counter()
    done = 0
    for case in request_cases():
        if done < most:
            statuses[case.play(attacker, target).status] += 1
            done += 1
    for device, content in zip(pool, _bad(made, pool, offers, honest, number), strict=False):
        if done < most:
            statuses[_uploaded(device, content)] += 1
            done += 1
    took = time.perf_counter() - began
    for device in (*pool, attacker):
        device.post(f"/tasks/{offers[device.id]['task']}/decline", wire.Decline("failed", "enough"))
    good = made.target(honest, offers[honest.id], attacker, offers[attacker.id]["task"])
    assert honest.upload(theirs, good.sound.payload).status == 200
    assert made.finished(of)["rounds"][0]["accepted"] >= 1
    return done, took


def _bad(
    made: Arena, pool: list[RawDevice], offers: dict[str, Any], other: RawDevice, number: int
) -> Iterator[list[bytes]]:
    """For each device of the pool one bad upload: of the corpus by turns, else mutated by seed."""
    corpus = result_cases()
    for at, device in enumerate(pool):
        target: Target = made.target(device, offers[device.id], other, offers[other.id]["task"])
        if at % 2:
            yield list(corpus[(number * len(pool) + at) % len(corpus)].requests(target))
        else:
            yield sent(target, mutated(target.sound.payload, random.Random(SEED + number * len(pool) + at)))


def _uploaded(device: RawDevice, requests: list[bytes]) -> int:
    for content in requests:
        answer = device.send(content)
        if answer.status != 200:
            break
    return answer.status


if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
