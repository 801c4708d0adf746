"""The report of a pretraining: its figures, the loss curve, the model's description, its lineage, and its profile as a page."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.datacenter import jobs
from coordinator.datacenter.documents import LINEAGE, MODEL, PUBLIC, REPORT, params_sha256, write_document
from coordinator.datacenter.pretrain_config import Pretraining
from coordinator.reports.curves import as_png, loss_name, make_figure
from coordinator.reports.run_files import write_schema
from edge_client.files import write_durably
from models.tasks import MODEL_KEYS

_ABOUT = ("device", "backend", "seconds", "restarts", "stall_seconds")

PAGE = "profile.html"
KINDS = {
    "compute": "#1f6feb",
    "communication": "#d1242f",
    "bubble": "#bf8700",
    "loader": "#8250df",
    "other": "#c8c8c8",
}


class Point(NamedTuple):
    """A step, counted from 1; learning rate and validation loss are None where unknown."""

    step: int
    loss: float
    rate: float | None = None
    validation_loss: float | None = None


def write_report(
    config: Pretraining, data: Mapping[str, Any], result: Mapping[str, Any], out: Path
) -> dict[str, Any]:
    """Writes the documents of a finished training. The report comes last: its presence marks the training as finished."""
    model = {
        **config.model.describe(data),
        "class_names": data["class_names"],
        "sha256": result["model_sha256"],
    }
    write_document(out / MODEL, model)
    write_schema(out, data.get("schema"))
    lineage = _lineage(config, data, result)
    write_document(out / LINEAGE, lineage)
    losses = result["losses"]
    draw_curve(out / "curves.png", config.name, read_curve(out, losses), loss_name(data["task"]))
    record = jobs.read(out)
    document = {
        "config": config.model_dump(mode="json", exclude_none=True),
        "data": {key: data[key] for key in ("fingerprint", "rows", *MODEL_KEYS, "preview")},
        "plan": result["plan"],
        "processes": result["world_size"],
        "steps": len(losses),
        "attempts": record.attempts if record else 1,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "final": _final(data, result),
        "about": {key: value for key, value in result.items() if key in _ABOUT},
        "lineage": lineage,
    }  # fmt: skip
    if "adapters" in result:
        document["adapters"] = {"adapt": config.model.adapt, **result["adapters"]}
    if "validation" in result:
        document["validation"] = result["validation"]
    if config.profile is not None:
        document["profile"] = _profile(out / config.profile.get("folder", "profile"))
    write_document(out / REPORT, document)
    return document


def _final(data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the trained model; of quantities R2, and the errors in the labels' own unit."""
    final = {
        key: result[key] for key in ("test_accuracy", "test_loss", "parameters", "bytes", "model_sha256")
    }
    if "metrics" in result:
        _, deviation = data["schema"]["label_scale"]
        found = result["metrics"]
        final["metrics"] = {**found, **{key: found[key] * deviation for key in ("mae", "rmse")}}
    return final


def describe_validation(found: Mapping[str, Any]) -> str:
    """One line about the validation of a report."""
    return (
        f"validation loss {found['last_loss']:.4f}, lowest {found['best_loss']:.4f} at step {found['best_step']}, on "
        f"{found['rows']} rows held out of the training set; the model is that of step {found['result_step']}"
    )


def _profile(folder: Path) -> dict[str, Any] | None:
    """The path and the figures of a profile's page; None if a resumed training was too short for one."""
    if not (folder / "profile.json").exists():
        return None
    profile = json.loads((folder / "profile.json").read_text("utf-8"))
    return {"page": str(write_page(folder)), **figures(profile)}


def _lineage(config: Pretraining, data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of a model: everything that determines its params, by hash."""
    document = config.model_dump(mode="json", exclude_none=True)
    parent = config.model.init
    return {
        "model_sha256": result["model_sha256"],
        "parent": {"path": parent, "sha256": params_sha256(Path(parent))} if parent else None,
        "data_fingerprint": data["fingerprint"],
        PUBLIC: config.data.is_public,
        "config_sha256": hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest(),
        "code_version": version("fedloop"),
        "plan": result["plan"],
        "seed": config.seed,
    }


def read_curve(folder: Path, losses: Sequence[float]) -> list[Point]:
    """The points of `curve.jsonl` if the worker wrote one; otherwise those of `losses`."""
    path = folder / "curve.jsonl"
    if not path.exists():
        return [Point(step, loss) for step, loss in enumerate(losses, 1)]
    points = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return [
        Point(point["step"], point["loss"], point.get("lr"), point.get("validation_loss")) for point in points
    ]


def draw_curve(path: Path, title: str, points: Sequence[Point], loss: str = "cross-entropy") -> None:
    """Plots losses and learning rate by step into the PNG `path`. `loss`: what it is."""
    figure, left, right = make_figure()
    left.plot(
        [each.step for each in points],
        [each.loss for each in points],
        color="#1f6feb",
        lw=0.8,
        label="training",
    )
    scored = [(each.step, each.validation_loss) for each in points if each.validation_loss is not None]
    if scored:
        left.plot(*zip(*scored, strict=True), color="#d1242f", marker=".", label="validation")
        left.legend(frameon=False, fontsize=9)
    left.set_ylabel(f"{'' if scored else 'training '}loss ({loss})")
    left.set_ylim(bottom=0)
    rates = [(each.step, each.rate) for each in points if each.rate is not None]
    right.plot([step for step, _ in rates], [rate for _, rate in rates], color="#8a8a8a")
    right.set_ylabel("learning rate")
    for axes in (left, right):
        axes.set_xlabel("step")
    figure.suptitle(title)
    write_durably(path, as_png(figure))


def write_page(folder: Path) -> Path:
    """Writes the page beside the `profile.json` in `folder` and returns its path.

    Raises:
        OSError: the profile is missing, or the page cannot be written.
    """
    profile = json.loads((folder / "profile.json").read_text("utf-8"))
    path = folder / PAGE
    write_durably(path, render_page(profile).encode())
    return path


def render_page(profile: Mapping[str, Any]) -> str:
    """The HTML of a profile."""
    plot = base64.b64encode(draw_plot(profile)).decode()
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>"
        for name, value in figures(profile).items()
    )
    traces = ", ".join(
        f'<a href="trace-rank{rank["rank"]}.json">rank {rank["rank"]}</a>' for rank in profile["ranks"]
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Profile: {html.escape(profile["plan"])}</title>
<style>body {{ font: 15px system-ui; margin: 2em auto; max-width: 70em; }} th {{ text-align: left; padding-right: 2em; }}
img {{ max-width: 100%; }}</style>
<h1>Where the time goes: {html.escape(profile["plan"])}</h1>
<table>{rows}</table>
<img alt="Seconds of a step by process, and bytes allocated over time" src="data:image/png;base64,{plot}">
<p>Each moment of a step counts for the first of these that applies: waiting for a batch; computing; communication while
nothing is computed; messages between stages (bubble); other: Python, and processor stalls.
Open a trace in chrome://tracing or ui.perfetto.dev: {traces}.</p>
</html>
"""


def figures(profile: Mapping[str, Any]) -> dict[str, str]:
    """The figures on the page and the command line, by name."""
    last = profile["first_step"] + profile["steps"] - 1
    tokens = profile["tokens_per_second"]
    return {
        "steps": f"{profile['first_step']} to {last}, of {len(profile['ranks'])} processes on {profile['device']}, {profile['backend']}",
        "step": f"{profile['step_seconds']:.4g} s (median)",
        "speed": f"{profile['rows_per_second']:,.0f} rows/s"
        + (f", {tokens:,.0f} tokens/s" if tokens else ""),
        "computing": f"{profile['mean_seconds']['compute'] / sum(profile['mean_seconds'].values()):.1%} of a step",
        "exposed communication": f"{profile['exposed_share']:.1%}",
        "pipeline bubble": f"{profile['bubble_share']:.1%}",
        "waiting for batches": f"{profile['loader_share']:.1%}",
        "MFU": f"{profile['mfu']:.1%} of {profile['peak_flops'] / 1e12:.3g} TFLOP/s ({profile['peak_from']}); "
        f"{profile['flops_per_step']:.3g} operations a step ({profile['flops_from']})",
        "peak memory": f"{max(rank['memory']['peak_bytes'] for rank in profile['ranks']) / 2**20:,.1f} MiB a process "
        f"({profile['ranks'][0]['memory']['from']})",
    }


def draw_plot(profile: Mapping[str, Any]) -> bytes:
    """A PNG: the time of a step by process and activity, and memory over the profiled steps."""
    figure, left, right = make_figure()
    ranks = profile["ranks"]
    names = [str(rank["rank"]) for rank in ranks]
    before = [0.0] * len(ranks)
    for kind, colour in KINDS.items():
        seconds = [1e3 * rank["mean_seconds"][kind] for rank in ranks]
        left.barh(names, seconds, left=before, color=colour, label=kind)
        before = [each + more for each, more in zip(before, seconds, strict=True)]
    left.invert_yaxis()
    left.set_xlabel("milliseconds of a step")
    left.set_ylabel("rank")
    left.legend(fontsize=8, ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for rank in ranks:
        memory = rank["memory"]
        mebibytes = [bytes_ / 2**20 for bytes_ in memory["bytes"]]
        right.plot(memory["seconds"], mebibytes, lw=0.8, drawstyle="steps-post", label=f"rank {rank['rank']}")
    right.set_xlabel("seconds")
    right.set_ylabel(f"MiB, {ranks[0]['memory']['from']}")
    right.legend(fontsize=8)
    return as_png(figure)
