"""What the operator may call a run: the path of its folder, its name, or the beginning of its id.

A run is either the folder that `fedloop simulate` or `fedloop run` left, or a row of a coordinator. `find_run` decides which
one is meant; `LocalRun` and `RemoteRun` then answer in the same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from coordinator.errors import UserError
from coordinator.operator.client import OperatorClient, Refused, connect, find_run_id
from coordinator.short_ids import short_id

if TYPE_CHECKING:
    # Only for type checking: `fedloop --help` needs none of what it imports.
    from coordinator.reports.run_folders import FolderRun

FOLDER = Path("runs")
"""Folder of runs by default, as that of `--out`."""


@dataclass(frozen=True)
class LocalRun:
    """A run in a folder."""

    run: FolderRun

    @property
    def label(self) -> str:
        return str(self.run.folder)

    def row(self) -> dict[str, Any]:
        run = self.run
        return {
            "id": str(run.folder),
            "name": run.name,
            "state": run.state,
            "round": run.round,
            "rounds": run.rounds,
            "test_accuracy": run.test_accuracy,
            "r2": run.r2,
            "started_at": run.started_at,
            "run": run.fleet_run,
        }

    def report(self) -> dict[str, Any]:
        from coordinator.reports import run_folders

        return run_folders.read_report(self.run.folder)

    def events(self) -> Iterable[dict[str, Any]]:
        from coordinator.reports import folder_state

        return folder_state.iterate_events(self.run.folder)

    def require_simulation(self, verb: str) -> None:
        if self.run.fleet_run is not None:
            raise UserError(_refuse_fleet(verb, self.run.fleet_run))


@dataclass(frozen=True)
class RemoteRun:
    """A run at a coordinator, `shown` as its API shows it."""

    client: OperatorClient
    shown: Mapping[str, Any]

    @property
    def label(self) -> str:
        return short_id(str(self.shown["id"]))

    def row(self) -> dict[str, Any]:
        keys = ("id", "name", "state", "round", "rounds", "test_accuracy", "r2")
        run = self.shown["id"]
        return {**{key: self.shown[key] for key in keys}, "started_at": self.shown["created_at"], "run": run}

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = self.client.get(f"/runs/{self.shown['id']}/report")
        return report

    def events(self) -> Iterable[dict[str, Any]]:
        return self.client.pages(f"/runs/{self.shown['id']}/events", "events")

    def require_simulation(self, verb: str) -> None:
        raise UserError(_refuse_fleet(verb, self.shown["id"]))


def find_run(reference: str, coordinator: str | None, *, folders_too: bool = True) -> LocalRun | RemoteRun:
    """The run that `reference` means: a folder, else the only run whose id, name or folder begins so.

    Raises:
        UserError: it means no run, or several.
    """
    from coordinator.reports import run_folders

    if not reference.strip():
        raise UserError("RUN is empty; list the runs: fedloop runs list")
    folder = next(filter(run_folders.is_run, (Path(reference), FOLDER / reference)), None)
    local = run_folders.list_runs(FOLDER) if folder is None else [run_folders.read_run(folder)]
    if folder is None:
        local = [each for each in local if each.folder.name.startswith(reference)]
    if not folders_too:
        client = reach(coordinator) if local else connect(coordinator)
        return _find_remote(reference, client, local)
    client = None if folder is not None else reach(coordinator)
    run = find_run_id(client, reference) if client is not None else None
    if len(local) + (run is not None) > 1:
        names = [str(each.folder) for each in local] + (
            [f"run {short_id(run)} at the coordinator"] if run else []
        )
        raise UserError(f"{reference!r} matches {len(names)} runs: {', '.join(names[:5])}; give more of it")
    if local:
        return LocalRun(local[0])
    if client is not None and run is not None:
        return RemoteRun(client, client.get(f"/runs/{run}"))
    where = f"in {FOLDER}/" + (f" or at {client.url}" if client is not None else "")
    raise UserError(f"no run {where} matches {reference!r}; list them: fedloop runs list")


def _find_remote(reference: str, client: OperatorClient | None, local: Sequence[FolderRun]) -> RemoteRun:
    if client is not None:
        of_folder = local[0].fleet_run if len(local) == 1 else None
        run = find_run_id(client, of_folder or reference)
        if run is not None:
            return RemoteRun(client, client.get(f"/runs/{run}"))
    if local:
        raise UserError(
            f"{local[0].folder} is a folder; a simulation ends with the command that runs it: press Ctrl-C there. Only a run at a "
            "coordinator that answers can be cancelled"
        )
    at = f" at {client.url}" if client is not None else ""
    raise UserError(f"no run{at} matches {reference!r}; list them: fedloop runs list")


def reach(coordinator: str | None) -> OperatorClient | None:
    """The coordinator; None if none was named and none answers on this machine. Raises: UserError: the named one does not."""
    try:
        client = connect(coordinator)
        client.get("/runs", limit=1)
    except UserError as error:
        if coordinator is not None:
            raise
        if isinstance(error, Refused):
            typer.echo(f"note: only folders are searched: {error}", err=True)
        return None
    return client


def _refuse_fleet(verb: str, run: str) -> str:
    if verb == "resume":
        return (
            f"this folder is a copy of run {short_id(run)}, which is on devices; resume it at its coordinator: fedloop runs resume "
            f"{short_id(run)}"
        )
    return (
        f"run {short_id(run)} is on devices, and after its last round these have no part in it any more; go on with its model in a new "
        f"run: fedloop model add-run {short_id(run)} --name NAME, then fedloop run EXPERIMENT.toml --set model.init=NAME:VERSION"
    )
