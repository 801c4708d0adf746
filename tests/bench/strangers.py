"""What someone without certificate or token costs a coordinator: its memory, and the check-ins of an honest device.

Each attack comes from a process of its own, against a coordinator of its own, while an honest device checks in fifty
times a second. Promised: at most 32 MB over rest at the peak, 99 of 100 check-ins within 200 ms.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.support.arena import arena
from tests.support.raw_fuzz import fuzzed
from tests.support.stranger import ENDLESS, Port, flooded, seconds_until_closed, unfinished

MAX_GROWTH_BYTES = 32e6
MAX_P99_SECONDS = 0.2
SOCKETS = 500
FUZZED = 20_000
SEED = 20
_EACH_SECONDS = 3.0
_PAUSE_SECONDS = 0.02
_WARM_UP = 100
_ENDLESS_PATHS = {"device": "/device/v1/enrol", "operator": "/api/v1/tokens"}
_SLOW = (
    ("device", "/device/v1/checkin", True),
    ("device", "/device/v1/nowhere", False),
    ("device", "/device/v1/enrol", True),
    ("operator", "/api/v1/tokens", True),
    ("operator", "/nowhere", False),
)

Attack = Callable[[str, str], dict[str, Any]]
"""Gets the URLs of the device and the operator port; gives figures to print."""


def run() -> dict[str, Any]:
    """Figures of each attack; `failures` says which promises do not hold."""
    found: dict[str, Any] = {}
    failures: list[str] = []
    for attack in (endless, slow_bodies, large_bodies, raw_bytes):
        name = attack.__name__
        found[name], missed = _attacked(attack)
        failures += [f"{name}: {what}" for what in missed]
        for key, value in found[name].items():
            shown = f"{value:.1f}" if isinstance(value, float) else value
            sys.stdout.write(f"{name:14}{key:28}{shown}\n")
        sys.stdout.flush()
    return found | ({"failures": failures} if failures else {})


def endless(device: str, operator: str) -> dict[str, Any]:
    """Requests that never end, one connection after the other."""
    urls = {"device": device, "operator": operator}
    connections, sent = 0, 0
    for port, path in _ENDLESS_PATHS.items():
        for pieces in ENDLESS.values():
            end = time.monotonic() + _EACH_SECONDS
            while time.monotonic() < end:
                ending = flooded(Port(urls[port]), pieces(path), 2**30, _EACH_SECONDS)
                connections, sent = connections + 1, sent + ending.sent_bytes
    return {"connections": connections, "megabytes_sent": sent / 1e6}


def slow_bodies(device: str, operator: str) -> dict[str, Any]:
    """500 sockets at a time whose request is answered and goes on, by a byte a second or not at all."""
    urls = {"device": device, "operator": operator}
    longest = 0.0
    for port, path, drips in _SLOW:
        with ExitStack() as stack:
            lines = []
            for _ in range(SOCKETS):
                lines.append(stack.enter_context(Port(urls[port]).connected()))
                lines[-1].sendall(unfinished(path))
            longest = max(longest, seconds_until_closed(lines, 60.0, drips=drips))
    return {"sockets": SOCKETS * len(_SLOW), "longest_seconds_until_closed": longest}


def large_bodies(device: str, operator: str) -> dict[str, Any]:
    """40 bodies of a megabyte at a time, again and again."""
    content, answered = b"x" * 10**6, 0
    end = time.monotonic() + 3 * _EACH_SECONDS
    while time.monotonic() < end:
        with ExitStack() as stack:
            lines = [stack.enter_context(Port(device).connected()) for _ in range(40)]
            for line in lines:
                line.sendall(unfinished("/device/v1/enrol", len(content))[:-1])
                line.setblocking(False)
            for line in lines:
                with suppress(OSError):
                    line.send(content)
            for line in lines:
                line.settimeout(_EACH_SECONDS)
                with suppress(OSError):
                    answered += line.recv(4096).startswith(b"HTTP/1.1 413")
    return {"refused": answered}


def raw_bytes(device: str, operator: str) -> dict[str, Any]:
    """The fuzzer of the protocol."""
    began = time.monotonic()
    found = fuzzed(device, operator, SEED, FUZZED)
    assert not found.endings["never"], found.endings
    assert not [status for status in found.statuses if status >= 500], found.statuses
    return {
        "connections": FUZZED,
        "seconds": time.monotonic() - began,
        "statuses": dict(sorted(found.statuses.items())),
        "endings": dict(sorted(found.endings.items())),
    }


def _attacked(attack: Attack) -> tuple[dict[str, Any], list[str]]:
    """The attack's own figures with memory and latency, and which promises do not hold."""
    with (
        tempfile.TemporaryDirectory() as folder,
        arena(Path(folder)) as made,
        ProcessPoolExecutor(1, get_context("spawn"), _as_stranger) as other,
    ):
        (honest,) = made.enrol(1)

        def check_in() -> float:
            began = time.perf_counter()
            assert honest.check_in(made.checkin()).status == 200
            took = time.perf_counter() - began
            time.sleep(_PAUSE_SECONDS)
            return took

        other.submit(int).result()  # it is up before the time counts
        idle = [check_in() for _ in range(_WARM_UP)]
        rest = made.memory().resident
        attacking = other.submit(attack, made.fleet.device_url, made.fleet.operator_url)
        latencies = []
        while not attacking.done():
            latencies.append(check_in())
        after = made.memory()
        figures = {
            **attacking.result(),
            "megabytes_at_rest": rest / 1e6,
            "megabytes_after": after.resident / 1e6,
            "megabytes_peak_over_rest": (after.peak - rest) / 1e6,
            "idle_p99_milliseconds": _p99(idle) * 1e3,
            "p50_milliseconds": sorted(latencies)[len(latencies) // 2] * 1e3,
            "p99_milliseconds": _p99(latencies) * 1e3,
            "longest_milliseconds": max(latencies) * 1e3,
        }
        missed = [
            what
            for what, holds in (
                (f"{(after.peak - rest) / 1e6:.0f} MB over rest", after.peak - rest <= MAX_GROWTH_BYTES),
                (f"p99 is {_p99(latencies) * 1e3:.0f} ms", _p99(latencies) < MAX_P99_SECONDS),
                (f"the coordinator failed: {made.failures()[:3]}", not made.failures()),
            )
            if not holds
        ]
    return figures, missed


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


def _as_stranger() -> None:
    """Strangers have their own processor: on this one they get what the coordinator and the honest device leave."""
    os.nice(10)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))


if __name__ == "__main__":
    run()
