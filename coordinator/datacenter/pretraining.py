"""A pretraining from its configuration to its report.

    1. the folder: store the resolved configuration
    2. the data: loaded in a worker, as arrays in `data/`
    3. the plan: check that model and batch can follow it, before anything starts
    4. the training: as a job, which resumes from its last checkpoint after an interruption
    5. the report: curves, the model's description (`model.json`), its lineage (`lineage.json`)

Everything that imports a framework or runs a user's code happens in worker processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs, pretrain_config, training_data
from coordinator.datacenter.documents import CONFIG, REPORT, params_sha256
from coordinator.datacenter.job_worker import JobFailed, ReadyWorker, Stage, Supervisor, ready_worker
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.datacenter.pretrain_config import Pretraining
from coordinator.datacenter.pretrain_report import write_report
from coordinator.datacenter.training_data import as_user_errors
from coordinator.errors import UserError
from coordinator.output_folders import begin, require_new, resumable, undone_if_refused
from coordinator.storage.private_folders import private_folder
from coordinator.toml_files import read_toml
from edge_client.files import write_durably
from models import options
from models.datasets.token_files.directory import SPLITS
from models.pretrain.parameter_server.settings import Servers

_CHECKED = "checked.json"


def pretrain(config: Pretraining, out: Path, environment: Environment) -> dict[str, Any]:
    """Trains into the empty or new folder `out` and returns the report.

    Raises:
        UserError: the configuration or its data is wrong, or `out` is not empty.
        RunInterrupted: the training stopped for another reason; it can be resumed.
    """
    _check_environment(config, environment)
    require_new(out, hint=f", or resume with: fedloop pretrain --resume {out}")
    with undone_if_refused(out, lambda: jobs.read(out) is not None):
        begin(out, CONFIG, config.to_toml())
        return _run(config, out, environment)


def resume(out: Path, environment: Environment, sets: Sequence[str] = (), plan: str = "") -> dict[str, Any]:
    """Continues the pretraining in `out` from its last checkpoint, with the changes of `--set` and `--plan`.

    Returns the report of a finished one, unless the changes make it longer.

    Raises:
        UserError: `out` holds no pretraining, or one that cannot continue with these changes.
        RunInterrupted: as `pretrain`.
    """
    path = out / CONFIG
    if not path.exists():
        raise UserError(f"--resume {out}: there is no pretraining here (no {CONFIG})")
    config, changes = pretrain_config.change(read_toml(path), str(path), sets, plan)
    if is_finished(out) and not changes:
        report: dict[str, Any] = json.loads((out / REPORT).read_text("utf-8"))
        return report
    _check_environment(config, environment)
    if changes:
        _reconfigure(config, out, environment)
    for change in changes:
        environment.progress.note(change)
    return _run(config, out, environment)


def _reconfigure(config: Pretraining, out: Path, environment: Environment) -> None:
    """Stores `config` in `out` if the model, the data and the checkpoints there allow it."""
    if jobs.read(out) is not None:
        data = _load_data(config, out / "data", environment)
        rows = config.train_rows(data)
        training = config.options(rows)
        steps = training.steps_of(-(-rows // training.batch_size))
        names = [path.name.removeprefix("step-") for path in (out / "checkpoints").glob("step-*")]
        done = max((int(name) for name in names if name.isdecimal()), default=0)
        if steps < done or (steps == done and is_finished(out)):
            raise UserError(
                f"--resume {out}: it has been trained for {done} steps and cannot be set to {steps}; raise the number with "
                "--set train.steps=…"
            )
        write_durably(out / _CHECKED, json.dumps(check(config, data)).encode())
    (out / REPORT).unlink(missing_ok=True)
    write_durably(out / CONFIG, config.to_toml().encode())


def is_finished(out: Path) -> bool:
    """Whether the pretraining in `out` has its report."""
    return (out / REPORT).exists()


def check(config: Pretraining, data: Mapping[str, Any], ready: ReadyWorker | None = None) -> dict[str, Any]:
    """The model's sizes, if it can follow the plan. Raises: UserError: it cannot, with every reason."""
    with private_folder() as folder, as_user_errors():
        return jobs.run(_job("check", config, data, folder), folder, ready=ready)


def plan(config: Pretraining, planner: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """The plans possible with `planner["processes"]` processes, fastest first, from a profile of a few steps.

    `planner` holds keys of the planner's settings; the configuration's own `[plan]` fixes the keys it names.

    Raises:
        UserError: the model, the data or the fixed keys leave no plan.
    """
    message = f"profiling {config.model.name} on this machine"
    return _try_out("plan", config, {"planner": dict(planner)}, environment, message, plan=config.fixed_plan)


def tune(config: Pretraining, tuner: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """Learning rate, warm-up and batch size chosen by short trainings (`models.pretrain.planner.tune`).

    `tuner` holds keys of its settings.

    Raises:
        UserError: the model, the data or the settings are wrong.
    """
    message = f"trying options of {config.model.name}"
    return _try_out("tune", config, {"tune": dict(tuner)}, environment, message, plan={}, processes=1)


def _try_out(
    stage: Stage,
    config: Pretraining,
    settings: Mapping[str, Any],
    environment: Environment,
    message: str,
    **changes: Any,
) -> dict[str, Any]:
    """The result of a job with these settings and changes that leaves nothing behind."""
    with private_folder() as folder:
        environment.progress.stage(f"loading {config.data.dataset}")
        data = _load_data(config, folder / "data", environment)
        environment.progress.stage(message)
        job = _job(stage, config, data, folder / "data" / "arrays")
        job = replace(job, more={**job.more, **settings}, **changes)
        with as_user_errors():
            return jobs.run(job, folder, environment.progress.trained, environment.clock)


def _load_data(config: Pretraining, folder: Path, environment: Environment) -> dict[str, Any]:
    """As `training_data.load_data`, but reuses what is already complete in `folder`."""
    done = jobs.read(folder)
    if done is not None and done.state == "finished":
        loaded = jobs.resume(folder)
        training_data.check_loaded(loaded)
        return loaded
    settings = config.data.model_dump(exclude_none=True, exclude={"validation_rows"})
    return training_data.load_data(settings, config.seed, folder, environment)


def _run(config: Pretraining, out: Path, environment: Environment) -> dict[str, Any]:
    progress = environment.progress
    # one that waits in a queue would only hold memory
    early = config.server is None and environment.queue is None and environment.hosts is None
    with (
        resumable(f"resume with: fedloop pretrain --resume {out}", JobFailed),
        ready_worker(config.parallel_plan.processes, out) if early else nullcontext() as ready,
    ):
        progress.stage(f"loading {config.data.dataset}")
        data = _load_data(config, out / "data", environment)
        for line in data.get("shown", data["preview"]):
            progress.note(line)
        _require_same_tokens(config, out)
        if jobs.read(out) is None:
            progress.stage("checking the plan")
            write_durably(out / _CHECKED, json.dumps(check(config, data, ready)).encode())
        checked = json.loads((out / _CHECKED).read_text("utf-8"))
        for line in _describe_scaling(config, data):
            progress.note(line)
        progress.stage(
            f"training {config.model.name}, {_describe_parameters(checked)}, {_describe_processes(config)}"
        )
        stage: Stage = "pretrain" if config.server is None else "serve"
        job = _job(stage, config, data, out / "data" / "arrays")
        if environment.hosts is not None:
            job = environment.hosts.applied_to(job, checked["sizes"])
        result = _train(job, out, environment, ready)
        progress.stage("writing the report")
        return write_report(config, data, result, out)


def _require_same_tokens(config: Pretraining, out: Path) -> None:
    """Refuses data whose token ids mean other texts than those that `model.init` was trained on."""
    if config.model.init is None:
        return
    own, former = (
        folder / "data" / "arrays" / "encoding.json" for folder in (out, Path(config.model.init).parent)
    )
    if own.is_file() and former.is_file() and own.read_bytes() != former.read_bytes():
        raise UserError(
            f"model.init = {config.model.init!r} was trained on other tokens ({former}) than those of this data ({own}); "
            'with data.encoding = "bytes" every text has the same ones'
        )


def _describe_scaling(config: Pretraining, data: Mapping[str, Any]) -> list[str]:
    """One line for each training option that `[scaling]` changes."""
    if config.scaling is None:
        return []
    scaled = asdict(config.options(config.train_rows(data)))
    return [
        f"train.{key}: {config.train[key]:g} -> {value:g}, for {config.train['batch_size']} rows a batch, not "
        f"{config.scaling.base_batch_size}"
        for key, value in scaled.items()
        if value != config.train[key]
    ]


def _describe_parameters(checked: Mapping[str, Any]) -> str:
    count, trained = checked["parameters"], checked.get("trained")
    some = trained is not None and trained < count
    return f"{trained:,} of {count:,} parameters" if some else f"{count:,} parameters"


def _init_sha256(init: str) -> str:
    try:
        return params_sha256(Path(init))
    except OSError as error:
        raise UserError(f"model.init = {init!r}: {error.strerror}") from None


def _describe_processes(config: Pretraining) -> str:
    if config.server is not None:
        return f"with a parameter server: {options.read(Servers, config.server, 'server')}"
    plan = config.parallel_plan
    return f"on {plan.processes} process{'es' * (plan.processes > 1)}: {plan}"


def _check_environment(config: Pretraining, environment: Environment) -> None:
    """Refuses a pretraining that would wait in the queue for ever, or that does not fit the hosts."""
    if environment.hosts is not None:
        environment.hosts.check(config)
    if environment.queue is not None:
        saves = config.checkpoint.every > 0 and config.server is None
        environment.queue.check(config.parallel_plan.processes, saves=saves)


def _train(
    job: DatacenterJob, out: Path, environment: Environment, ready: ReadyWorker | None
) -> dict[str, Any]:
    """The result of the training in `out`, started or resumed as often as the queue preempts it."""
    progress = environment.progress

    def attempt(supervisor: Supervisor) -> dict[str, Any]:
        if jobs.read(out) is None:
            return jobs.run(job, out, progress.trained, environment.clock, supervisor, ready)
        jobs.reconfigure(job, out)
        return jobs.resume(out, progress.trained, environment.clock, supervisor, ready)

    if environment.queue is None:
        return attempt(environment.supervisor if "checkpoint" in job.more else lambda stop: nullcontext())
    return environment.queue.run(str(out), job.processes, attempt, progress.stage)


def _job(stage: Stage, config: Pretraining, data: Mapping[str, Any], arrays: Path) -> DatacenterJob:
    more: dict[str, Any] = {}
    if config.checkpoint.every and config.server is None:
        more["checkpoint"] = config.checkpoint.model_dump()
    if config.server is None:
        more["hang_seconds"] = config.hang_seconds
    if config.train["validate_every"]:
        more["validation_rows"] = config.data.validation_rows
    if config.profile is not None:
        more["profile"] = config.profile
    if config.model.init is not None:
        more["init"] = {"params": config.model.init, "head": config.model.head or "same"}
    if config.model.init is not None and config.model.adapt is not None:
        more["init"] |= {"adapt": config.model.adapt, "sha256": _init_sha256(config.model.init)}
    if "tokens" in data:
        parts = {
            part: str((arrays / data["tokens"][part]).absolute()) for part in SPLITS if part in data["tokens"]
        }
        more["tokens"] = {**data["tokens"], **parts}
    if config.server is not None:
        more["server"] = config.server
    return DatacenterJob(
        stage,
        config.model.describe(data),
        arrays,
        options=asdict(config.options(config.train_rows(data))),
        seed=config.seed,
        processes=config.parallel_plan.processes,
        plan=config.plan,
        more=more,
    )
