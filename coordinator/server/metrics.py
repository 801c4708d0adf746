"""Prometheus metrics of one coordinator, in a registry of its own.

State in the database (runs, rounds, updates by reason, devices by state) is counted there at each scrape, so the
figures are right after a restart too. Requests, bytes and commits are counted as they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection

from coordinator.context.signals import Signals
from coordinator.db import tables
from coordinator.db.store import Database


class Metrics:
    """Everything that `/metrics` shows."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_DatabaseCollector(database, signals))
        self._requests = Histogram(
            "fedloop_request_seconds",
            "Duration of requests, by route template.",
            ("api", "route", "status"),
            registry=self._registry,
            buckets=(0.005, 0.025, 0.1, 0.5, 2.5, 10, 60),
        )
        self._bytes_in = Counter(
            "fedloop_received_bytes", "Bytes of request bodies.", ("api",), registry=self._registry
        )
        self._bytes_out = Counter(
            "fedloop_sent_bytes", "Bytes of answers.", ("api",), registry=self._registry
        )
        self._batches = Histogram(
            "fedloop_commit_writes",
            "Writes that one database commit carried.",
            registry=self._registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )

    def add(self, collector: Collector) -> None:
        """Registers the collector of another part of the process."""
        self._registry.register(collector)

    def request(self, api: str, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        self._requests.labels(api, route, str(status)).observe(seconds)
        self._bytes_in.labels(api).inc(received)
        self._bytes_out.labels(api).inc(sent)

    def commit(self, writes: int) -> None:
        self._batches.observe(writes)

    def text(self) -> bytes:
        """The exposition format; reads the database."""
        return generate_latest(self._registry)


class _DatabaseCollector(Collector):
    """Gauges read from the database and the signals at each scrape."""

    def __init__(self, database: Database, signals: Signals) -> None:
        self._database = database
        self._signals = signals

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # nothing is read when the collector is registered

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._database.read(_counts)
        for name, (help_text, label, by_label) in counts.items():
            family = GaugeMetricFamily(name, help_text, labels=[label])
            for value, count in by_label.items():
                family.add_metric([value], count)
            yield family
        held = GaugeMetricFamily("fedloop_held_polls", "Devices that wait for a task in a long poll.")
        held.add_metric([], self._signals.count_waiting("device:"))
        yield held


_Counts = dict[str, tuple[str, str, dict[str, int]]]


def _counts(connection: Connection) -> _Counts:
    by = partial(tables.count_by, connection)
    tasks = tables.tasks.c
    return {
        "fedloop_devices": ("Devices, by state.", "state", by(tables.devices.c.state)),
        "fedloop_runs": ("Runs, by state.", "state", by(tables.runs.c.state)),
        "fedloop_rounds": ("Rounds, by state.", "state", by(tables.rounds.c.state)),
        "fedloop_tasks": ("Tasks, by state.", "state", by(tasks.state)),
        "fedloop_updates_rejected": (
            "Rejected updates, by reason.",
            "reason",
            by(tasks.reason, tasks.state == "rejected"),
        ),
    }
