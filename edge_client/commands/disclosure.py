"""Prints the ledger: the table, one payload, and what else the coordinator learns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from edge_client.config import EdgeConfig
from edge_client.daemon import main
from edge_client.daemon.ledger import Entry, Ledger, explain, summarize_tensors
from edge_client.state import State

Echo = Callable[[str], None]


def table(entries: Sequence[Entry], as_json: bool, echo: Echo) -> None:
    """Prints all entries, oldest first."""
    if as_json:
        echo(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    if not entries:
        echo("nothing has left this device; what a check-in reports: fedloop-edge ledger --explain")
    for entry in entries:
        when = datetime.fromtimestamp(entry.at).astimezone().isoformat(" ", "seconds")
        echo(
            f"{entry.id:>5}  {when}  {entry.run_name}, round {entry.round}  {entry.kind}  {entry.size_bytes} bytes  "
            f"{entry.sha256[:12]}  {entry.treated}  {entry.outcome or 'not acknowledged'}"
        )


def show(ledger: Ledger, entry: Entry, as_json: bool, echo: Echo) -> None:
    """Prints one entry's payload: the sums of an evaluation, or each tensor's shape, norm and extremes of an update."""
    payload = ledger.payload(entry)
    document: dict[str, Any] = asdict(entry)
    if entry.kind == "evaluation":
        document["sums"] = json.loads(payload)
    else:
        document["tensors"] = [asdict(view) for view in summarize_tensors(payload)]
    if as_json:
        echo(json.dumps(document, indent=2))
        return
    table([entry], False, echo)
    for key, value in document.get("sums", {}).items():
        echo(f"  {key}: {value}")
    for view in document.get("tensors", ()):
        echo(
            f"  {view['name']}  {tuple(view['shape'])}  norm {view['norm']:.6g}  "
            f"from {view['smallest']:.6g} to {view['largest']:.6g}"
        )


def explain_messages(config: EdgeConfig, state: State) -> dict[str, Any]:
    """Everything else the coordinator learns, with this device's own values."""
    return explain(main.checkin_now(config, state))
