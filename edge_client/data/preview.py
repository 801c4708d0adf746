"""Previews of the configured data sets, made in a process of their own: readers of data are large, the daemon is small.

python -m edge_client.data.preview rows BYTES     < tables as JSON     {name: {"rows": 12} or {"problem": "…"}}
python -m edge_client.data.preview preview BYTES  < one table as JSON  {"schema": …, "rows": …}

The process may use BYTES of memory, the limit of a training that reads the same data.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from edge_client.data import DataConfig, DataProblem, open_data
from edge_client.processes import process
from edge_client.wire.strict import parse

_SECONDS = 600.0
RECOUNT_SECONDS = 3600.0
PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 30.0
"""Between two counts of data that keeps changing."""


class RowCounts:
    """Rows of each data set that can be read; counted again when its file changed, or after an hour.

    A thread counts. The caller waits for it for a short time and otherwise gets the previous counts; `changed` is
    called once a later count differs. Not thread-safe.
    """

    def __init__(
        self,
        tables: Mapping[str, DataConfig],
        now: Callable[[], float],
        *,
        memory_bytes: int = 0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._tables = tables
        self._now = now
        self._memory_bytes = memory_bytes
        self._changed = changed
        self._counted_at = -RECOUNT_SECONDS
        self._seen: dict[str, Any] = {}
        self._rows: dict[str, int] = {}
        self._counting: threading.Thread | None = None

    def __call__(self) -> Mapping[str, int]:
        if self._counting is not None and not self._counting.is_alive():
            self._counting = None
        if self._counting is None and self._is_stale():
            self._counted_at = self._now()
            self._counting = threading.Thread(target=self._count, name="rows", daemon=True)
            self._counting.start()
            self._counting.join(PATIENCE_SECONDS)
        return self._rows

    def _is_stale(self) -> bool:
        seen = {name: _stamp(table.path) for name, table in self._tables.items()}
        age = self._now() - self._counted_at
        changed = seen != self._seen
        self._seen = seen if age >= _PAUSE_SECONDS else self._seen
        return bool(self._tables) and age >= (_PAUSE_SECONDS if changed else RECOUNT_SECONDS)

    def _count(self) -> None:
        counts = look(self._tables, self._memory_bytes)
        rows = {name: each for name, each in counts.items() if isinstance(each, int)}
        if rows != self._rows:
            self._rows = rows
            self._changed()


def look(tables: Mapping[str, DataConfig], memory_bytes: int) -> dict[str, int | str]:
    """Name -> training rows, or what is wrong with it. `memory_bytes`: limit for reading; 0: none."""
    answer = _run("rows", {name: asdict(table) for name, table in tables.items()}, memory_bytes)
    if "problem" in answer and not isinstance(answer["problem"], dict):
        return {name: str(answer["problem"]) for name in tables}
    return {name: each["rows"] if "rows" in each else str(each["problem"]) for name, each in answer.items()}


def preview(table: DataConfig, memory_bytes: int) -> dict[str, Any]:
    """Schema and first rows of a data set; `{"problem": …}` where it cannot be read."""
    return _run("preview", asdict(table), memory_bytes)


def _run(task: str, document: Mapping[str, Any], memory_bytes: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "edge_client.data.preview", task, str(memory_bytes)]
    try:
        return process.run_once(command, _SECONDS, document=document)
    except process.ProcessFailed as failure:
        if "MemoryError" in failure.output or "bad_alloc" in failure.output:
            return {"problem": f"reading it needs more memory than limits.memory_bytes = {memory_bytes}"}
        return {"problem": f"the process that reads it failed: {failure}"}


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status is not None else None


def _rows(document: Mapping[str, Any]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, table in document.items():
        try:
            config = parse(DataConfig, table, "data")
            rows[name] = {"rows": _count(config)}
        except DataProblem as problem:
            rows[name] = {"problem": str(problem)}
        except MemoryError:
            rows[name] = {"problem": "reading it needs more memory than limits.memory_bytes"}
    return rows


def _count(config: DataConfig) -> int:
    from edge_client.data import tables

    awaits = tables.awaits_schema(config)
    if awaits and not config.options.get("label"):
        return tables.count_rows(config)
    try:
        return len(open_data(config).train())
    except DataProblem:
        if not awaits:
            raise
        return tables.count_rows(config)  # texts, which a model's schema describes


def _preview(document: Mapping[str, Any]) -> dict[str, Any]:
    try:
        summary = open_data(parse(DataConfig, document, "data")).preview()
    except DataProblem as problem:
        return {"problem": str(problem)}
    assert is_dataclass(summary)
    return asdict(summary)


def _main() -> None:
    process.die_with_parent()
    process.lower_priority()
    process.limit_memory(int(sys.argv[2]))
    out = process.own_stdout()
    document = json.load(sys.stdin)
    answer = _rows(document) if sys.argv[1] == "rows" else _preview(document)
    json.dump(answer, out, default=str)
    out.flush()


if __name__ == "__main__":
    _main()
