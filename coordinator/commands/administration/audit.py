"""`fedloop audit`: who changed what, whether the record of it is intact, and copies of it for another machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.options import Json, Shown, command_group, remote_command
from coordinator.commands.output import make_table, print_json, print_lines
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, OperatorClient, Refused, connect
from edge_client.wire.strict import printable

if TYPE_CHECKING:  # imported by the commands that need them: they bring the database with them
    from coordinator.audit.copies import Copy
    from coordinator.audit.heads import Head

app = command_group("The audit log: every change by a person or a token, chained by hashes and signed.")

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

Known = Annotated[
    Path | None,
    typer.Option(
        "--head",
        help="An earlier export, with or without entries: the log must still contain it.",
        metavar="FILE",
    ),
]


@remote_command(app, "list", example="fedloop audit list --by alice --since 7d")
def list_changes(
    client: OperatorClient,
    by: Annotated[str | None, typer.Option("--by", help="Only by this user.", metavar="NAME")] = None,
    action: Annotated[
        str | None, typer.Option("--action", help="Only actions with this text, such as cancel.")
    ] = None,
    resource: Annotated[
        str | None,
        typer.Option("--resource", help="Only what names this: an id, or a part of one.", metavar="TEXT"),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Only this run, by its id or the beginning.", metavar="RUN")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="A date, a time, or how long ago: 2026-01-31, 36h, 7d.", metavar="TIME"),
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only refused attempts.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 100,
) -> Shown:
    """List changes and refused attempts, newest first."""
    if run is not None and resource is not None:
        raise UserError("--run and --resource: give one of them")
    records = client.pages(
        "/audit",
        "records",
        cursor="before",
        by=by,
        action=action,
        resource=run or resource,
        since=None if since is None else _time(since, datetime.now(UTC)).isoformat(),
        refused="true" if refused else None,
    )
    rows = list(islice(records, limit))
    return rows, _table(rows) if rows else ["no entries match"]


@app.command(epilog="Example: fedloop audit verify --head monday.jsonl")
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="An export. Default: the log of the coordinator.", show_default=False
        ),
    ] = None,
    known: Known = None,
    coordinator: Coordinator = None,
    as_json: Json = False,
) -> None:
    """Verify the chain and its signed head; names the first entry that was altered, deleted, inserted or moved.

    Exits with 1 if there is one. Entries deleted from the end, and a log that was rewritten from some entry on, are
    found with --head. The coordinator's log is compared with the head that the coordinator signed last, too.
    """
    from coordinator.audit.copies import Copy
    from coordinator.audit.verification import Altered

    try:
        earlier = None if known is None else Copy(known)
        hashes = {} if earlier is None else _known_hashes(earlier)
        count, head = _verify_file(file, hashes) if file else _verify_remote(connect(coordinator), hashes)
        if earlier is not None and head.key != earlier.head.key:
            raise Altered(
                head.number,
                f"the head is signed by the key {head.key[:16]}…, the earlier one by {earlier.head.key[:16]}…",
            )
    except Altered as altered:
        print_json(
            {"intact": False, "entry": altered.number, "reason": str(altered)}
        ) if as_json else typer.echo(f"altered: {altered}", err=True)
        raise typer.Exit(1) from None
    document = {"intact": True, "entries": count, "head": vars(head)}
    print_json(document) if as_json else print_lines(_verified(count, head, earlier))


@remote_command(app, example="fedloop audit export audit-2026-01.jsonl")
def export(
    client: OperatorClient,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to write it; a new file.", show_default=False)
    ],
    head_only: Annotated[
        bool, typer.Option("--head-only", help="Only the signed head, to note the state of the log.")
    ] = False,
) -> Shown:
    """Write the log with its signed head as JSON Lines. Keep it on another machine: it shows later what is missing."""
    from coordinator.audit.copies import write

    if file.exists():
        raise UserError(f"{file} exists; an export does not replace a file")
    head = _signed_head(client)
    count = write(file, iter(()) if head_only else _entries(client, head.number), head)
    document = {"file": str(file), "entries": count, "head": vars(head)}
    return document, [
        f"{count} entries and the head of entry {head.number} in {file}",
        f"signed by key {head.key}",
    ]


def _verify_file(file: Path, hashes: Mapping[int, str]) -> tuple[int, Head]:
    from coordinator.audit.copies import Copy
    from coordinator.audit.verification import Altered, verify_chain

    copy = Copy(file)
    if copy.head.number and next(copy.entries(), None) is None:
        raise UserError(
            f"{file} holds a head without entries: give it to --head, and an export or nothing in its place"
        )
    newest = max([copy.head.number, *hashes])
    if newest > copy.head.number:
        raise UserError(
            f"{file} ends with entry {copy.head.number}, --head with {newest}: give the older one to --head"
        )
    count = verify_chain(copy.entries(), {**_of(copy.head), **hashes})
    if count > copy.head.number:
        raise Altered(
            copy.head.number + 1, f"entry {copy.head.number + 1} was inserted: the signed head is before it"
        )
    return count, copy.head


def _verify_remote(client: OperatorClient, hashes: Mapping[int, str]) -> tuple[int, Head]:
    """As `_verify_file`, of the coordinator's log: up to the head that it signs now, and against the one before."""
    from coordinator.audit.heads import Head
    from coordinator.audit.verification import Altered, verify_chain

    try:
        head = _signed_head(client)
    except Refused as refused:
        if refused.code != "audit_altered":
            raise
        before = Head.parse(refused.details.get("head"), client.url)
        verify_chain(_entries(client), {**_of(before), **hashes})
        raise Altered(before.number, str(refused)) from None
    return verify_chain(_entries(client, head.number), {**_of(head), **hashes}), head


def _known_hashes(earlier: Copy) -> dict[int, str]:
    from coordinator.audit.verification import Altered

    try:
        return earlier.known_hashes()
    except Altered as altered:
        raise UserError(f"--head {earlier.path}: it is not intact itself: {altered}") from None


def _of(head: Head) -> dict[int, str]:
    return {head.number: head.hash} if head.number else {}


def _signed_head(client: OperatorClient) -> Head:
    from coordinator.audit.heads import Head

    return Head.parse(client.get("/audit/head"), client.url)


def _entries(client: OperatorClient, until: int | None = None) -> Iterator[dict[str, Any]]:
    """All entries as stored; those up to `until` if given, as the log grows meanwhile."""
    entries = client.pages("/audit/entries", "entries")
    return entries if until is None else takewhile(lambda entry: entry["number"] <= until, entries)


def _verified(count: int, head: Head, earlier: Copy | None) -> Iterator[str]:
    yield f"intact: {count} entries; head of {head.time}, signed by key {head.key}"
    if earlier is not None:
        yield f"contains entry {earlier.head.number} as it was at {earlier.head.time}"
    else:
        yield "not compared with an earlier export: --head finds entries deleted from the end, and a log rewritten with its key"


def _table(rows: list[dict[str, Any]]) -> Any:
    table = make_table("entry", "time", "by", "from", "action", "what", "outcome", right=("entry",))
    for row in rows:
        values = {**row["resource"], **row["details"]}
        table.add_row(
            str(row["number"]),
            f"{row['time'][:19].replace('T', ' ')} UTC",
            printable(row["name"] or row["kind"])
            + (" (admin token)" if row["kind"] == "admin_token" else ""),
            printable(row["address"]),
            printable(row["action"]),
            printable(", ".join(f"{key} {value}" for key, value in values.items())),
            f"{row['outcome']} {row['status'] or ''}".strip(),
        )
    return table


def _time(text: str, now: datetime) -> datetime:
    """A time in ISO 8601, local unless it has a zone; or how long before `now`."""
    if match := re.fullmatch(r"(\d{1,6})([mhdw])", text):
        return now - timedelta(**{_UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise UserError(
            f"--since {text!r}: expected a date or time such as 2026-01-31 or 2026-01-31T14:00, or how long ago, such as 36h "
            "or 7d"
        ) from None
