"""Looking at the configured data sets, in a process of its own: readers of data are large, the daemon is small.

python -m edge_client.datasets rows      < tables as JSON     {name: {"rows": 12} or {"problem": "…"}}
python -m edge_client.datasets preview   < one table as JSON  {"schema": …, "rows": …}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from edge_client import process
from edge_client.connectors import DataConfig, DataProblem, open_data

_SECONDS = 200.0  # less than the service's watchdog
RECOUNT_SECONDS = 3600.0


class RowCounts:
    """Rows of each data set that can be read; counted again when its file changed, or after an hour."""

    def __init__(self, tables: Mapping[str, DataConfig], now: Callable[[], float]) -> None:
        self._tables = tables
        self._now = now
        self._counted_at = -RECOUNT_SECONDS
        self._seen: dict[str, Any] = {}
        self._rows: dict[str, int] = {}

    def __call__(self) -> Mapping[str, int]:
        seen = {name: _stamp(table.path) for name, table in self._tables.items()}
        if self._tables and (seen != self._seen or self._now() - self._counted_at >= RECOUNT_SECONDS):
            self._rows = {name: found for name, found in look(self._tables).items() if isinstance(found, int)}
            self._seen, self._counted_at = seen, self._now()
        return self._rows


def look(tables: Mapping[str, DataConfig]) -> dict[str, int | str]:
    """Name -> training rows, or what is wrong with it."""
    answer = _ask("rows", {name: _as_json(table) for name, table in tables.items()})
    if "problem" in answer and not isinstance(answer["problem"], dict):
        return {name: str(answer["problem"]) for name in tables}
    return {
        name: found["rows"] if "rows" in found else str(found["problem"]) for name, found in answer.items()
    }


def preview(table: DataConfig) -> dict[str, Any]:
    """Schema and first rows of a data set; `{"problem": …}` where it cannot be read."""
    return _ask("preview", _as_json(table))


def _ask(what: str, document: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "edge_client.datasets", what]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(document),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            env=process.worker_environment(),
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"reading it takes longer than {_SECONDS:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"problem": f"the reader of data failed: {last[0]}"}
    return answer


def _as_json(table: DataConfig) -> dict[str, Any]:
    return {
        "kind": table.kind,
        "path": str(table.path) if table.path is not None else None,
        "options": dict(table.options),
    }


def _from_json(document: Mapping[str, Any]) -> DataConfig:
    path = Path(document["path"]) if document["path"] is not None else None
    return DataConfig(kind=document["kind"], path=path, options=document["options"])


def _stamp(path: Path | None) -> tuple[int, int] | None:
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size) if found is not None else None


def _rows(document: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, table in document.items():
        try:
            found[name] = {"rows": len(open_data(_from_json(table)).train())}
        except DataProblem as problem:
            found[name] = {"problem": str(problem)}
    return found


def _preview(document: Mapping[str, Any]) -> dict[str, Any]:
    try:
        seen = open_data(_from_json(document)).preview()
    except DataProblem as problem:
        return {"problem": str(problem)}
    assert is_dataclass(seen)
    return asdict(seen)


def _main() -> None:
    process.die_with_parent()
    out = process.own_stdout()
    document = json.load(sys.stdin)
    answer = _rows(document) if sys.argv[1] == "rows" else _preview(document)
    json.dump(answer, out, default=str)
    out.flush()


if __name__ == "__main__":
    _main()
