"""The public Python API: a federation as a function call.

    import fedloop

    result = fedloop.simulate({"local": {"lr": 0.1}, "federation": {"rounds": 10}}, out="runs/mine")
    result.accuracy, result.rounds[-1]["test_loss"], result.params["fc.weight"].shape

The engine runs in the calling process, clients in worker processes that end with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator import import_guard as _ownership

# Checked first: if one of our generic names is shadowed, the imports below fail.
if _wrong := _ownership.problems():
    raise ImportError("\n".join(_wrong))

from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments import experiment as _experiment
from coordinator.reports.progress import Progress as _Progress
from coordinator.reports.progress import Quiet as _Quiet
from coordinator.runs import simulation as _run
from edge_client.wire import arrays as _arrays
from strategies.params import Params

__all__ = ["Result", "RunInterrupted", "UserError", "resume", "simulate"]


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        out: its folder.
        report: the contents of `report.json`.
        params: the final model, PyTorch `state_dict` names and layout, float32.
    """

    out: Path
    report: dict[str, Any]
    params: Params

    @property
    def accuracy(self) -> float:
        """Accuracy of the final model, pooled over all held-out rows."""
        return float(self.report["final"]["test_accuracy"])

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """One object per round, as in `report.json`."""
        rounds: list[dict[str, Any]] = self.report["rounds"]
        return rounds


def simulate(
    experiment: Mapping[str, Any] | str | Path | None = None,
    *,
    out: str | Path,
    data_dir: str | Path | None = None,
    progress: _Progress | None = None,
) -> Result:
    """Runs a federation on this machine, as `fedloop simulate` does.

    Args:
        experiment: tables and keys of an experiment file, or the path of one; None for the defaults.
        out: folder for the results, new or empty.
        data_dir: folder of data files.
        progress: receives stages and rounds.

    Raises:
        UserError: the experiment or its data is wrong; says what and what to do.
        RunInterrupted: the run stopped for another reason; `resume(out)` continues it.
    """
    if isinstance(experiment, Mapping):
        resolved = _experiment.resolve(experiment, "experiment")
    else:
        resolved = _experiment.load(Path(experiment) if experiment is not None else None)
    folder = Path(out)
    return _result(folder, _run.simulate(resolved, folder, _environment(data_dir, progress)))


def resume(
    out: str | Path, *, data_dir: str | Path | None = None, progress: _Progress | None = None
) -> Result:
    """Resumes the run in `out` from its last committed round; returns a finished one unchanged.

    Raises:
        UserError: there is no run, or its experiment or data were changed.
        RunInterrupted: as `simulate`.
    """
    folder = Path(out)
    return _result(folder, _run.resume(folder, _environment(data_dir, progress)))


def _environment(data_dir: str | Path | None, progress: _Progress | None) -> _run.Environment:
    return _run.Environment(Path(data_dir) if data_dir is not None else None, progress or _Quiet())


def _result(folder: Path, report: dict[str, Any]) -> Result:
    return Result(folder, report, _arrays.decode((folder / "model.safetensors").read_bytes()))
