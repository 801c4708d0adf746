"""Operator API: jobs. Simulate, pretrain, plan, compress and export on the coordinator's machine; watch, stop and resume it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from coordinator.api.deps import PrincipalDep, RequestBody, ServicesDep
from coordinator.context.services import Services
from coordinator.db.project_filter import NOBODY
from coordinator.errors import Refusal
from coordinator.jobs import folders, queries
from coordinator.jobs.tables import LIVE, JobRow, Kind, State
from coordinator.toml_files import parse_toml

router = APIRouter(tags=["jobs"])


class JobRequest(RequestBody):
    """A job. `document`: the file of the command that does the same, as the text of its TOML or the same in JSON.

    `source`: for a compression or an export, the id of the finished job whose model it starts from.
    """

    kind: Kind
    document: str | dict[str, Any] = ""
    sets: list[str] = Field([], max_length=1000)
    source: str | None = None
    priority: int = Field(0, ge=-10, le=10, description="Higher values start first.")


class JobProgress(BaseModel):
    """How far a job is: its last stage, and `done` of `total` rounds, steps or epochs. What is not known is null."""

    stage: str | None = None
    unit: str | None = None
    done: int | None = None
    total: int | None = None
    loss: float | None = None
    accuracy: float | None = None


class JobSummary(BaseModel):
    """A job. `files`: results that can be fetched, with their sizes in bytes."""

    id: str
    kind: Kind
    name: str
    state: State
    source: str | None
    processes: int
    priority: int
    attempts: int
    created_by: str
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    error: str | None
    progress: JobProgress
    files: dict[str, int]


class Job(JobSummary):
    """A job with its document, all defaults filled in."""

    document: dict[str, Any]
    profile: dict[str, Any] | None = Field(
        description="Where a training's time goes, from the moment its profiled steps have run; null without a profile."
    )


class JobEvents(BaseModel):
    """A page of a job's events."""

    events: list[dict[str, Any]]
    next: int | None = Field(description="`after` for the next page; null if there is nothing more now.")


class JobService(Protocol):
    """What these routes use of `coordinator.jobs.service.JobService`."""

    def folder(self, job: str) -> Path: ...

    def create(
        self,
        kind: Kind,
        document: Mapping[str, Any],
        sets: Sequence[str],
        source: str | None,
        priority: int,
        created_by: str,
        project: str,
    ) -> JobRow: ...

    def cancel(self, job: str) -> None: ...

    def resume(self, job: str) -> None: ...

    def remove(self, job: str) -> None: ...


def jobs_of(request: Request) -> JobService:
    """The job service of the process that serves this request. Raises: Refusal: 409 `no_jobs`."""
    service: JobService | None = request.app.state.jobs
    if service is None:
        raise Refusal(409, "no_jobs", "this coordinator runs no jobs")
    return service


JobsDep = Annotated[JobService, Depends(jobs_of)]


@router.post("/jobs", status_code=201)
def create_job(request: JobRequest, principal: PrincipalDep, service: JobsDep) -> Job:
    """Queues a job; it starts when enough slots are free.

    422 lists all problems of the document. 422 `code_not_allowed`, `path_not_allowed`: it names code, or a file outside the
    coordinator's data folders. 409 `job_state`: the source has not finished; 409 `no_jobs`: this coordinator runs none;
    409 `too_many_jobs`: too many have not ended.
    """
    document = request.document
    if isinstance(document, str):
        document = parse_toml(document, request.kind)
    project = principal.project or NOBODY
    created = service.create(
        request.kind, document, request.sets, request.source, request.priority, principal.name, project
    )
    return _render(created, service)


@router.get("/jobs")
def list_jobs(
    services: ServicesDep,
    service: JobsDep,
    state: State | None = None,
    kind: Annotated[list[Kind] | None, Query(description="May be repeated.")] = None,
    called: Annotated[
        str | None, Query(pattern="^[^\\x00]*$", description="A name, or the beginning of an id.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[JobSummary]:
    """Jobs, newest first, without their documents."""
    read = partial(queries.newest, limit=limit, state=state, kinds=kind or (), called=called)
    return [JobSummary(**_values(row, service)) for row in services.database.read(read)]


@router.get("/jobs/{job}")
def get_job(job: str, services: ServicesDep, service: JobsDep) -> Job:
    """One job."""
    return _render(_read(services, job), service)


@router.get("/jobs/{job}/events")
def list_job_events(
    job: str,
    services: ServicesDep,
    service: JobsDep,
    after: Annotated[int, Query(ge=0, description="Only events after this one.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> JobEvents:
    """What the job has reported so far, oldest first, a page at a time: stages, notes, rounds, steps."""
    _read(services, job)
    page = folders.events(service.folder(job), after, limit)
    return JobEvents(events=page, next=page[-1]["id"] if len(page) == limit else None)


@router.get("/jobs/{job}/curve")
def get_job_curve(
    job: str,
    services: ServicesDep,
    service: JobsDep,
    points: Annotated[
        int, Query(ge=2, le=2000, description="Most points; others are left out evenly.")
    ] = 500,
) -> list[dict[str, Any]]:
    """The curves of a training by `step`, or of a simulation by `round`, so far."""
    _read(services, job)
    return folders.curve(service.folder(job), points)


@router.get("/jobs/{job}/report")
def get_job_report(job: str, services: ServicesDep, service: JobsDep) -> dict[str, Any]:
    """The report of a finished job, as the command of its kind writes it; of a plan, the ranking. 409 `job_state` before."""
    row = _read(services, job)
    report = folders.report(service.folder(job))
    if report is None:
        raise Refusal(409, "job_state", f"job {job} is {row.state} and has no report", state=row.state)
    return report


@router.get("/jobs/{job}/files/{name}", response_class=FileResponse)
def get_job_file(job: str, name: str, services: ServicesDep, service: JobsDep) -> FileResponse:
    """A file that the job left, one of `files`."""
    _read(services, job)
    folder = service.folder(job)
    if name not in folders.results(folder):
        raise Refusal(404, "unknown_file", f"job {job} has no file {name[:100]}")
    return FileResponse(folder / folders.OUT / name, media_type="application/octet-stream", filename=name)


@router.post("/jobs/{job}/cancel")
def cancel_job(job: str, services: ServicesDep, service: JobsDep) -> Job:
    """Ends a job now; what it has stored stays."""
    _read(services, job)  # it is of this project
    service.cancel(job)
    return _render(_read(services, job), service)


@router.post("/jobs/{job}/resume")
def resume_job(job: str, services: ServicesDep, service: JobsDep) -> Job:
    """Queues a job again that failed, was cancelled or interrupted. It goes on from its last checkpoint; an export starts again."""
    _read(services, job)  # it is of this project
    service.resume(job)
    return _render(_read(services, job), service)


@router.delete("/jobs/{job}", status_code=204)
def remove_job(job: str, services: ServicesDep, service: JobsDep) -> None:
    """Removes a job that has ended, with its files."""
    _read(services, job)  # it is of this project
    service.remove(job)


def _read(services: Services, job: str) -> JobRow:
    return services.database.read(partial(queries.require, job=job))


def _render(row: JobRow, service: JobService) -> Job:
    profile = folders.profile(service.folder(row.id))
    return Job(**_values(row, service), document=dict(row.document), profile=profile)


def _values(row: JobRow, service: JobService) -> dict[str, Any]:
    folder = service.folder(row.id)
    derived: dict[str, Any] = {
        "progress": JobProgress(**folders.progress(folder)),
        "files": {} if row.state in LIVE else folders.results(folder),
    }
    columns = (key for key in JobSummary.model_fields if key not in derived)
    return {**derived, **{key: getattr(row, key) for key in columns}}
