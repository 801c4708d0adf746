"""The public Python API: a federation as a function call.

    import fedloop

    result = fedloop.simulate({"local": {"lr": 0.1}, "federation": {"rounds": 10}}, out="runs/mine")
    result.accuracy, result.params["fc.weight"].shape

    result = fedloop.simulate(model=Net, data={"x": x, "y": y})
    result.plot()
    labels, probabilities = result.predict(x[:5])

The engine runs in the calling process, clients in worker processes that end with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as _version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator import import_guard as _ownership

# Checked first: if one of our generic names is shadowed, the imports below fail.
if _wrong := _ownership.problems():
    raise ImportError("\n".join(_wrong))

from coordinator.errors import RunInterrupted, UserError
from coordinator.experiments import experiment as _experiment
from coordinator.experiments import objects as _objects
from coordinator.output_folders import default_folder as _default_folder
from coordinator.privacy import accountant as _accountant
from coordinator.privacy.accountant import Guarantee
from coordinator.reports import curves as _curves
from coordinator.reports.progress import Progress as _Progress
from coordinator.reports.progress import Quiet as _Quiet
from coordinator.runs import prediction as _prediction
from coordinator.runs import simulation as _run
from coordinator.runs.prediction import Predictions
from edge_client.wire import arrays as _arrays
from strategies.params import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Guarantee",
    "Predictions",
    "Result",
    "RunInterrupted",
    "UserError",
    "epsilon",
    "flower_strategy",
    "resume",
    "simulate",
]

__version__ = _version("fedloop")


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        rounds, final = len(self.report["rounds"]), self.report["final"]
        figure = "loss" if self.accuracy is None else "accuracy"
        value = final[f"test_{figure}"]
        shown = "None" if value is None else f"{value:.4f}"
        return f"Result(out={str(self.out)!r}, rounds={rounds}, {figure}={shown})"

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the final model, pooled over all held-out rows; None where it predicts a quantity."""
        accuracy: float | None = self.report["final"]["test_accuracy"]
        return accuracy

    @property
    def rounds(self) -> Any:
        """One row per round: a pandas DataFrame where pandas is installed, else the list `report["rounds"]`."""
        rounds: list[dict[str, Any]] = self.report["rounds"]
        try:
            import pandas as pd
        except ModuleNotFoundError:
            return rounds
        return pd.DataFrame(rounds)

    def plot(self) -> Figure:
        """Loss and accuracy over rounds, as in `curves.png`; a notebook shows the figure."""
        report = self.report
        loss = "squared error" if self.accuracy is None else "cross-entropy"
        figure = _curves.make_curves(report["experiment"]["name"], report["start"], report["rounds"], loss)
        # A notebook calls this, whichever backend it has.
        figure._repr_png_ = partial(_curves.as_png, figure)  # type: ignore[attr-defined]
        return figure

    def predict(
        self,
        x: Any,
        *,
        site_rows: str | Path | None = None,
        leave_out: Sequence[str] = (),
        encoding: str | None = None,
    ) -> Predictions:
        """Labels and probabilities for rows `x`.

        An array [N, …], or a single row, is taken as the model takes it: of a table's columns, numbers scaled and texts
        one-hot. A pandas DataFrame, or a list of dicts, has a table's columns in natural form, in any order; a list of texts is
        for a model of texts. The path of a file is read in its natural form, as `fedloop-edge predict` reads it. Imports the
        model's framework and, for a model of one's own, its code.

        Args:
            site_rows: table of the site's training rows, for a model with `data.scale = "site"`.
            leave_out: columns that are not inputs.
            encoding: of the text of files; None: as the training table's.

        Raises:
            UserError: the rows do not fit the model, or it cannot be built here.
        """
        reading = _prediction.Reading(
            Path(site_rows) if site_rows is not None else None, tuple(leave_out), encoding
        )
        return _prediction.predict(self.report, self.params, x, reading)


def simulate(
    experiment: Mapping[str, Any] | str | Path | None = None,
    *,
    model: Any = None,
    data: Any = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    progress: _Progress | None = None,
) -> Result:
    """Runs a federation on this machine, as `fedloop simulate` does.

    Args:
        experiment: tables and keys of an experiment file, or the path of one; None for the defaults.
        model: a `torch.nn.Module`, whose weights the run begins with; a function or class that builds one, called with
            `input_shape`, `classes` and the options in `[model]` where it takes them; or a name. Functions and classes
            travel as source, into `model.py` in `out`.
        data: a mapping with `x` and `y`, and optionally `test` or `x_test` and `y_test`, `site`, `classes`,
            `class_names`, `task`; a function of `data_dir` and `seed` that returns one; a pandas DataFrame, which is read as a
            table by the keys of `[data]`; or a name. The rows are kept in
            `out`, readable by its owner alone, until the run is finished.
        out: folder for the results, new or empty; None: `runs/<name>-<time>`.
        data_dir: folder of data files.
        progress: receives stages and rounds; None: a notebook or IPython shows them, and otherwise nothing does.

    Raises:
        UserError: the experiment or its data is wrong; says what and what to do.
        RunInterrupted: the run stopped for another reason; `resume(out)` continues it.
    """
    path = None if experiment is None or isinstance(experiment, Mapping) else Path(experiment)
    document = experiment if isinstance(experiment, Mapping) else _experiment.read_document(path)
    source = str(path) if path else "experiment"
    folder = Path(out) if out is not None else _default_folder(_objects.run_name(document, data))
    with _environment(data_dir, progress) as environment:
        named, fill = _objects.name_objects(document, folder, model, data, environment.data_dir)
        report = _run.simulate(
            _experiment.resolve(_experiment.with_start(named), source), folder, environment, fill
        )
    return _result(folder, report)


def resume(
    out: str | Path, *, data_dir: str | Path | None = None, progress: _Progress | None = None
) -> Result:
    """Resumes the run in `out` from its last committed round; returns a finished one unchanged.

    Model and data that were given as objects are read from `out`, which therefore must not have moved.

    Raises:
        UserError: there is no run, or its experiment or data were changed.
        RunInterrupted: as `simulate`.
    """
    folder = Path(out)
    with _environment(data_dir, progress) as environment:
        report = _run.resume(folder, environment)
    return _result(folder, report)


def flower_strategy(name: str, options: Mapping[str, Any] | None = None, **of_flower: Any) -> Any:
    """A strategy of Fedloop as a `flwr.serverapp.strategy.Strategy`, for the `ServerApp` of a Flower app.

    Args:
        name: such as "multi_krum"; `fedloop strategies` lists them. Those whose clients take other steps than plain ones are refused.
        options: of the strategy, such as {"malicious": 2}.
        of_flower: arguments of Flower's `FedAvg`, which samples the nodes: fraction_train, min_train_nodes, weighted_by_key.

    Raises:
        UserError: the strategy or an option is unknown, or not for a Flower app.
    """
    from coordinator.on_flower.strategy import FedloopStrategy

    return FedloopStrategy(name, options or {}, **of_flower)


def epsilon(
    *,
    noise_multiplier: float,
    rounds: int,
    cohort: int,
    clients: int,
    delta: float = 1e-5,
    sampling: _accountant.Sampling = "poisson",
    accountant: _accountant.AccountantName = "pld",
) -> Guarantee:
    """The differential privacy of a federated training, with all that it assumes: print its `in_words()`.

    Args:
        noise_multiplier: standard deviation of the noise on a round's sum over the norm that updates are clipped to.
        cohort: clients in a round, with `sampling = "poisson"` on average; `clients`: of which they are drawn.
        sampling: `poisson`, `fixed` or `none`, as `privacy.sampling` of an experiment.
        accountant: `pld`, `rdp`, or `rdp_classic`, whose conversion older papers use.

    Raises:
        ValueError: a number is out of range, or the accountant does not know this kind of sampling.
    """
    kind = _accountant.NoisyRound(noise_multiplier, sampling, cohort, clients)
    return _accountant.epsilon_after(kind, rounds, delta, accountant)


@contextmanager
def _environment(data_dir: str | Path | None, progress: _Progress | None) -> Iterator[_run.Environment]:
    make = partial(_run.Environment, Path(data_dir) if data_dir is not None else None)
    if progress is None and _in_ipython():
        from coordinator.commands.output import RichProgress

        with RichProgress() as shown:
            yield make(shown)
    else:
        yield make(progress or _Quiet())


def _in_ipython() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def _result(folder: Path, report: dict[str, Any]) -> Result:
    return Result(folder, report, _arrays.decode((folder / "model.safetensors").read_bytes()))
