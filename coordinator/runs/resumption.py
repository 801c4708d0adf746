"""What a resumed simulation goes on with: the experiment in its folder, after the settings that may change."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.errors import UserError
from coordinator.experiments import adapters
from coordinator.experiments.experiment import MAY_CHANGE, change, resolve
from coordinator.experiments.schema import Experiment
from coordinator.output_folders import begin, locked
from coordinator.reports.folder_state import EXPERIMENT, LOCK, committed_round, fleet_run, is_finished
from coordinator.rounds.records import Checkpoint
from coordinator.short_ids import short_id
from coordinator.toml_files import read_toml
from edge_client.files import write_durably
from edge_client.wire import arrays
from strategies.params import Params, ShapeMismatch, require_same_shapes

_FILES = ("profiles", "replay")
"""Keys of [simulation] that name a file."""


def read(out: Path, sets: Sequence[str] = ()) -> Experiment:
    """The experiment of the simulation in `out` after `--set` settings, which are stored there.

    Of a finished simulation only more rounds are stored.

    Raises:
        UserError: `out` holds no simulation, another process works in it, or a key may not change so.
    """
    path = out / EXPERIMENT
    if not path.exists():
        raise UserError(f"--resume {out}: there is no run here (no {path.name})")
    if (run := fleet_run(out)) is not None:
        raise UserError(
            f"--resume {out}: this is the report of run {short_id(run)} on devices, which its coordinator resumes by itself; watch it: "
            f"fedloop run --follow {short_id(run)}"
        )
    before = resolve(read_toml(path), str(path), stored=True)
    after = change(before, str(path), sets)
    rounds, committed = after.federation.rounds, committed_round(out)
    if rounds < committed:
        raise UserError(
            f"--resume {out}: federation.rounds = {rounds} is less than the {committed} rounds that it has committed; expected "
            f"{committed} or more"
        )
    if after == before or (is_finished(out) and rounds == before.federation.rounds):
        return before
    with locked(out / LOCK, taken(out)):
        begin(out, EXPERIMENT, after.to_toml())
    return after


@contextmanager
def restored_if_refused(out: Path) -> Iterator[None]:
    """Restores the experiment in `out`, and removes a new workspace, if a `UserError` ends the run before another round."""
    path, committed = out / EXPERIMENT, committed_round(out)
    work = out / "work"
    is_new = not work.exists()
    before = path.read_bytes() if path.exists() else None
    try:
        yield
    except UserError:
        if committed_round(out) == committed:
            if before is not None and path.read_bytes() != before:
                write_durably(path, before)
            if is_new:
                shutil.rmtree(work, ignore_errors=True)
        raise


def taken(out: Path) -> UserError:
    """The error while another process runs the simulation in `out`."""
    return UserError(f"{out}: another process is running this experiment")


def hash_files(experiment: Experiment) -> dict[str, str]:
    """The SHA-256 of each file that says how the clients of a simulation behave, by key.

    Raises:
        UserError: one cannot be read.
    """
    hashes: dict[str, str] = {}
    for key in _FILES:
        path = getattr(experiment.simulation, key)
        try:
            hashes |= {} if path is None else {key: arrays.sha256(Path(path).read_bytes())}
        except OSError as error:
            raise UserError(f"simulation.{key}: {path} cannot be read: {error.strerror}") from None
    return hashes


def require_same(checkpoint: Checkpoint, params: Params, identity: Mapping[str, str], out: Path) -> None:
    """Refuses to go on from a checkpoint of other data or another experiment. `params`: fresh ones of the model.

    Raises:
        UserError: naming what was changed since the run began.
    """
    if checkpoint.identity["experiment"] != identity["experiment"]:
        raise UserError(
            f"{out / 'experiment.toml'} was changed since the run began; only {' and '.join(MAY_CHANGE)} may change on "
            "--resume"
        )
    if checkpoint.identity["data"] != identity["data"]:
        raise UserError(f"--resume {out}: the data is not what the run began with (its fingerprint differs)")
    if checkpoint.identity.get("server_data", "") != identity["server_data"]:
        raise UserError(
            f"--resume {out}: the data of the server is not what the run began with (its fingerprint differs)"
        )
    if checkpoint.identity.get("backbone") != identity.get("backbone"):
        raise UserError(
            f"--resume {out}: the frozen backbone is not what the run began with; was model.init replaced?"
        )
    for key in _FILES:
        if checkpoint.identity.get(key) != identity.get(key):
            raise UserError(f"--resume {out}: the file of simulation.{key} is not what the run began with")
    try:
        require_same_shapes(checkpoint.params, params)
    except ShapeMismatch as error:
        raise UserError(
            f"--resume {out}: the model's code was changed since the run began: {error}"
        ) from None


def remove_leftovers(out: Path) -> None:
    """Removes what a killed process had not finished to write."""
    for leftover in [*out.glob(".*.tmp"), *out.glob("checkpoint/**/.*.tmp")]:
        leftover.unlink(missing_ok=True)


def record_engine(experiment: Experiment, engine: str, out: Path) -> Experiment:
    """The experiment with the engine that "auto" stands for, which its folder keeps for a resumed run."""
    if experiment.simulation.engine != "auto":
        return experiment
    simulation = experiment.simulation.model_copy(update={"engine": engine})
    experiment = experiment.model_copy(update={"simulation": simulation})
    write_durably(out / EXPERIMENT, experiment.to_toml().encode())
    return experiment


def identify(experiment: Experiment, data_info: Mapping[str, Any], work: Path) -> dict[str, str]:
    """What must be the same when the run is resumed. `work`: the folder of its workspace."""
    return {
        "data": data_info["fingerprint"],
        "server_data": data_info.get("server", {}).get("fingerprint", ""),
        "experiment": _hash_experiment(experiment),
        **adapters.fingerprint(experiment, work),
        **hash_files(experiment),
    }


def _hash_experiment(experiment: Experiment) -> str:
    """Hash of everything that affects the result: all but the numbers of rounds and workers, and the keys of devices."""
    document = experiment.model_dump(mode="json", exclude_none=True)
    del document["federation"]["rounds"], document["simulation"]["workers"], document["devices"]
    if document["data"]["seed"] == document["seed"]:
        del document["data"]["seed"]  # runs of before have no seed of the data of their own
    if document["downlink"] == {}:
        del document["downlink"]  # runs of before have none
    if document["simulation"]["engine"] == "pool":
        document["simulation"]["engine"] = "processes"  # as runs of before call it
    if not document["server_data"]:
        del document["server_data"]  # of which runs of before have none
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
