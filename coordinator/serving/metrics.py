"""Figures of all deployments for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

_GAUGES = {
    "workers": "Workers that are ready.",
    "waiting_rows": "Rows that wait.",
    "memory_bytes": "Memory of all workers, what they share counted once.",
}
_COUNTERS = {
    "requests": "Requests answered by this version.",
    "failed": "Requests that the model could not answer.",
    "rows": "Rows answered by this version.",
    "batches": "Batches computed by this version.",
    "worker_restarts": "Workers that ended by themselves.",
    "switches": "Versions that took the place of another.",
}


class _Figures(Collector):
    def __init__(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "fedloop_serving_ready", "Whether the deployment answers.", labels=["model"]
        )
        for each in self._statuses:
            ready.add_metric([each["name"]], float(each["ready"]))
        yield ready
        for key, text in _GAUGES.items():
            yield self._fill(
                GaugeMetricFamily(f"fedloop_serving_{key}", text, labels=["model", "version"]), key
            )
        for key, text in _COUNTERS.items():
            yield self._fill(
                CounterMetricFamily(f"fedloop_serving_{key}", text, labels=["model", "version"]), key
            )

    def _fill(self, family: Any, key: str) -> Metric:
        for each in self._statuses:
            if key in each:
                family.add_metric([each["name"], each["version"]], float(each[key]))
        metric: Metric = family
        return metric

    def describe(self) -> Iterable[Metric]:
        return []


def encode_metrics(statuses: Sequence[Mapping[str, Any]]) -> bytes:
    """The text format. `statuses`: as `Serving.status` returns them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(statuses))
    return generate_latest(registry)
