"""The report of a pretraining: its figures, the loss curve, the model's description and its lineage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs, profile_report
from coordinator.datacenter.documents import LINEAGE, MODEL, PUBLIC, REPORT, write_document
from coordinator.datacenter.pretrain_config import Pretraining
from coordinator.experiments.schema import MODEL_KEYS
from coordinator.reports.curves import as_png, make_figure
from edge_client.files import file_sha256, write_durably

_ABOUT = ("device", "backend", "seconds", "restarts", "stall_seconds")

Point = tuple[int, float, float | None]
"""Step, counted from 1; loss; learning rate, if known."""


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
    lineage = _lineage(config, data, result)
    write_document(out / LINEAGE, lineage)
    losses = result["losses"]
    draw_curve(out / "curves.png", config.name, read_curve(out, losses))
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
        "final": {key: result[key] for key in ("test_accuracy", "test_loss", "parameters", "bytes", "model_sha256")},
        "about": {key: value for key, value in result.items() if key in _ABOUT},
        "lineage": lineage,
    }  # fmt: skip
    if config.profile is not None:
        document["profile"] = _profile(out / config.profile.get("folder", "profile"))
    write_document(out / REPORT, document)
    return document


def _profile(folder: Path) -> dict[str, Any] | None:
    """The path and the figures of a profile's page; None if a resumed training was too short for one."""
    if not (folder / "profile.json").exists():
        return None
    profile = json.loads((folder / "profile.json").read_text("utf-8"))
    return {"page": str(profile_report.write_page(folder)), **profile_report.figures(profile)}


def _lineage(config: Pretraining, data: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The origin of a model: everything that determines its params, by hash."""
    document = config.model_dump(mode="json", exclude_none=True)
    parent = config.model.init
    return {
        "model_sha256": result["model_sha256"],
        "parent": {"path": parent, "sha256": file_sha256(Path(parent))} if parent else None,
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
        return [(step, loss, None) for step, loss in enumerate(losses, 1)]
    points = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return [(point["step"], point["loss"], point.get("lr")) for point in points]


def draw_curve(path: Path, title: str, points: Sequence[Point]) -> None:
    """Plots loss and learning rate by step into the PNG `path`."""
    figure, left, right = make_figure()
    steps = [step for step, _, _ in points]
    left.plot(steps, [loss for _, loss, _ in points], color="#1f6feb", lw=0.8)
    left.set_ylabel("training loss (cross-entropy)")
    left.set_ylim(bottom=0)
    rates = [(step, rate) for step, _, rate in points if rate is not None]
    right.plot([step for step, _ in rates], [rate for _, rate in rates], color="#8a8a8a")
    right.set_ylabel("learning rate")
    for axes in (left, right):
        axes.set_xlabel("step")
    figure.suptitle(title)
    write_durably(path, as_png(figure))
