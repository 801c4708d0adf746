"""`fedloop serving bench`: load on a running server, and what it answers, how fast, at what cost."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from coordinator.errors import UserError
from coordinator.serving.measuring.load import (
    Load,
    binary_request,
    closed_loop,
    json_request,
    open_loop,
    random_rows,
)
from coordinator.serving.resources.processes import cpu_seconds

_REQUESTS = 16
"""Different ones, sent in turns."""


@dataclass(frozen=True)
class Plan:
    """A load. `rows`: of each request; `rate`: requests a second of an open loop, None: a closed loop; `token`: or empty."""

    name: str
    rows: int = 1
    connections: int = 32
    seconds: float = 10.0
    binary: bool = False
    rate: float | None = None
    token: str = ""
    seed: int = 0


async def run(url: str, pid: int, plan: Plan, status: Mapping[str, Any]) -> dict[str, Any]:
    """What became of the load. One request a connection goes ahead and is not counted.

    Args:
        url, pid: of the server, which runs on this machine.
        status: of the deployment: shape and dtype of a row.

    Raises:
        UserError: no server answers, or it takes no requests without another token.
    """
    parts = urlsplit(url)
    place: dict[str, Any] = {"host": parts.hostname, "tls": _tls() if parts.scheme == "https" else None}
    port = parts.port or (443 if parts.scheme == "https" else 80)
    requests = _requests(plan, status)
    try:
        before = await closed_loop(port, requests, plan.connections, total=plan.connections, **place)
        if {"no_token", "bad_token"} & set(before.codes):
            raise UserError("the server takes no request without its token; name the file: --token-file FILE")
        load = Load()
        server, client = cpu_seconds(pid), time.process_time()
        if plan.rate is None:
            until = time.perf_counter() + plan.seconds
            load = await closed_loop(
                port, requests, plan.connections, until=lambda: time.perf_counter() >= until, **place
            )
        else:
            arrivals = poisson_arrivals(plan.rate, plan.seconds, plan.seed)
            await open_loop(port, requests[0], arrivals, plan.connections, load=load, **place)
    except OSError as error:
        raise UserError(f"{url}: no connection can be made: {error.strerror or error}") from None
    return summarize(load, plan, cpu_seconds(pid) - server, time.process_time() - client)


def poisson_arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of independent arrivals, `rate` a second on average, in ascending order."""
    rng = np.random.default_rng(seed)
    times: list[float] = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds))).tolist()
    return times


def summarize(load: Load, plan: Plan, server_cpu: float, client_cpu: float) -> dict[str, Any]:
    """The figures of a load. Times in milliseconds, of answers with status 200."""
    answered = len(load.seconds)
    found: dict[str, Any] = {
        "deployment": plan.name,
        "rows": plan.rows,
        "connections": plan.connections,
        "rate": plan.rate,
        "seconds": round(load.wall, 3),
        "requests": answered + load.failed,
        "answered": answered,
        "requests_a_second": round(answered / load.wall, 1) if load.wall else 0.0,
        "rows_a_second": round(answered * plan.rows / load.wall, 1) if load.wall else 0.0,
        "failures": dict(sorted(load.codes.items())),
        "server_cpu_seconds": round(server_cpu, 3),
        "client_cpu_seconds": round(client_cpu, 3),
    }
    for percent in (50, 95, 99):
        value = float(np.percentile(load.seconds, percent)) if answered else None
        found[f"p{percent}_ms"] = None if value is None else round(1000 * value, 3)
    return found


def _requests(plan: Plan, status: Mapping[str, Any]) -> list[bytes]:
    """Requests with random rows: numbers from 0 to 1, or ids below the vocabulary."""
    rng = np.random.default_rng(plan.seed)
    make = binary_request if plan.binary else json_request
    headers = f"Authorization: Bearer {plan.token}\r\n" if plan.token else ""
    return [
        make(
            f"/v2/models/{plan.name}/infer",
            random_rows(rng, plan.rows, status),
            headers=headers,
        )
        for _ in range(_REQUESTS)
    ]


def _tls() -> ssl.SSLContext:
    """Without a check of the certificate, which is for the names that others reach this machine by."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
