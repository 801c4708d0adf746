"""Training that starts from the params of an earlier one: a job's `init`.

    "init": {"params": "model.safetensors", "head": "new"}

`params` is a file of ours, or a folder in Hugging Face's layout (`models.hugging_face`), of which one tensor is read at a time.
With the default head, `same`, every tensor must fit. With `new`, the model's last module keeps its fresh weights, for
other classes or another task (Devlin 2019, section 3.2). With `adapt`, few params are trained (`models.pretrain.recovery.fine_tuning`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from models.hugging_face.checkpoint import Checkpoint, open_checkpoint
from models.hugging_face.folder import Folder, open_file
from models.job import JobError, JobFile
from models.pretrain.params import FromParams, float_tensors
from models.pretrain.recovery.fine_tuning import with_adapters
from models.zoo.spec import ModelSpec

_LISTED = 8


@dataclass(frozen=True)
class Initial:
    """A job's `init`: a file or folder of `params`, relative to the job file, and which `head` the model begins with.

    Attributes:
        adapt: which few params are trained, as `models.adaptation` reads it; empty: all.
        sha256: of the params; with `adapt`, a training resumes only on the same ones.
    """

    params: str
    head: Literal["same", "new"] = "same"
    adapt: str = ""
    sha256: str = ""


def with_init(job: JobFile, spec: ModelSpec) -> ModelSpec:
    """`spec`, whose new modules start from the params that the job's `init` names, if any.

    Raises:
        JobError: the file cannot be read, or its tensors do not fit; lists those that do not.
    """
    init = job.table("init", Initial)
    if init is None:
        return spec
    path = job.file("init.params", init.params)
    known = init.sha256 or str(path.absolute())
    return with_params(spec, path, new_head=init.head == "new", adapt=init.adapt, sha256=known)


def with_params(
    spec: ModelSpec, path: Path, *, new_head: bool, adapt: str = "", sha256: str = ""
) -> ModelSpec:
    """`spec`, whose new modules start from the params in `path`, except the head with `new_head`.

    With `adapt`, they train few params on these, whose hash is `sha256`.

    Raises:
        JobError: the file cannot be read, or its tensors do not fit; lists those that do not.
    """
    source = open_params(path)
    names = require_fit(source, spec, path, new_head=new_head)
    if adapt:  # which leaves the names of all tensors as they are
        spec = with_adapters(spec, adapt, sha256)
    return replace(spec, module=FromParams(spec.module, source, frozenset(names)))


def open_params(path: Path) -> Folder | Checkpoint:
    """The params in a file of ours or a folder in Hugging Face's layout, under our names, read one by one.

    Raises:
        JobError: it cannot be read.
    """
    return open_checkpoint(path) if path.is_dir() else open_file(path)


def require_fit(
    source: Folder | Checkpoint, spec: ModelSpec, path: Path, *, new_head: bool = False
) -> list[str]:
    """The names of the tensors that the model takes from `source`, which are all but those of a `new_head`.

    Raises:
        JobError: its tensors do not fit; lists those that do not.
    """
    with torch.device("meta"):
        built = spec.module()
    head = _head(built, spec) if new_head else ""
    expected = {
        name: tuple(tensor.shape) for name, tensor in float_tensors(built).items() if not _within(name, head)
    }
    problems = source.mismatches(expected)
    unknown = sorted(name for name in source.shapes.keys() - expected.keys() if not _within(name, head))
    problems += [f"{name!r} is not one of the model's" for name in unknown]
    if problems:
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        advice = "" if new_head else '; `head = "new"` leaves the last module out'
        raise JobError(
            f"{path} does not fit model {spec.name!r}: {'; '.join(problems[:_LISTED])}{more}{advice}"
        )
    return sorted(expected)


def _head(module: nn.Module, spec: ModelSpec) -> str:
    """Path of the last module: of the layout's order, or of the direct children."""
    if spec.layout is not None and spec.layout.order:
        return spec.layout.order[-1]
    return [name for name, _ in module.named_children()][-1]


def _within(name: str, head: str) -> bool:
    return bool(head) and name.startswith(f"{head}.")
