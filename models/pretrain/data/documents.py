"""Attention confined to documents, where several are packed into one window (Zhao 2024, "Analysing the impact of sequence
composition on language model pre-training"; Llama 3, section 3.2).

    spec = spec_of(job)     the job's model; with `packing = "documents"`, its attention is confined

Each token sees the tokens of its own document only, and learned positions count from the start of the document, so a window of
documents is computed as these documents one by one. The model itself is unchanged: hooks give its attention a mask and its tokens other
positions, which follow from the tokens: a document ends with the end-of-document id.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from models.job import JobError, JobFile
from models.pretrain.data import token_settings
from models.zoo.blocks.attention import Rotations
from models.zoo.layout import Layout, matching
from models.zoo.spec import ModelSpec
from models.zoo.transformer import MASKED

_ARGUMENTS = 4
"""Of a module of attention that takes a mask: query, key, value, bias."""


def spec_of(job: JobFile) -> ModelSpec:
    """The model of `job`, which computes packed documents one by one if the job packs them.

    Raises:
        JobError: the model is wrong, or its attention takes no mask.
    """
    spec = job.spec()
    if not token_settings.names_directory(job):
        return spec
    settings = token_settings.from_job(job)
    if settings.packing != "documents":
        return spec
    return confined(spec, settings.end_of_document, str(job.path))


def confined(spec: ModelSpec, end: int, where: str) -> ModelSpec:
    """`spec`, whose attention does not cross the token `end`. `where` begins errors.

    Raises:
        JobError: the model does not say where its attention is, or that takes no mask.
    """
    layout = spec.layout
    needs = f'{where}: data.packing is "documents", but model {spec.name!r}'
    concatenate = 'use "concatenate"'
    if layout is None or not layout.attention:
        raise JobError(f"{needs} does not say where its attention is (its layout); {concatenate}")
    with torch.device("meta"):
        module = spec.module()
    for path, core in matching(module, layout.attention):
        if len(inspect.signature(core.forward).parameters) < _ARGUMENTS:
            raise JobError(
                f"{needs} has attention that takes no mask: {path} ({type(core).__name__}); {concatenate}"
            )

    def build() -> nn.Module:
        built = spec.module()
        _attach(built, layout, end)
        return built

    return replace(spec, module=build, layout=replace(layout, documents=True))


@dataclass
class _Documents:
    """The documents in the batch that is computed.

    Attributes:
        same: bool [B, 1, T, T], whether a query and a key are of one document; causal: of these, keys that are not later.
        positions: [B, T], of each token in its document.
    """

    same: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    causal: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def find_documents(x: torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of token ids [B, T] the number of each token's document in its row, and its position there, int64 [B, T] each."""
    ends = (x == end).long()
    number = ends.cumsum(1) - ends
    place = torch.arange(x.shape[1], device=x.device).expand_as(number)
    starts = torch.where(number.diff(dim=1, prepend=number[:, :1] - 1) > 0, place, 0)
    return number, place - starts.cummax(1).values


@dataclass
class _Find:
    """Before the first module: finds the documents in its tokens."""

    documents: _Documents
    end: int

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0]
        number, self.documents.positions = find_documents(x, self.end)
        same = (number[:, :, None] == number[:, None, :])[:, None]
        self.documents.same, self.documents.causal = same, same.tril()


@dataclass
class _Mask:
    """Before attention: adds the mask to its arguments."""

    documents: _Documents

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        query, key, value, *bias = inputs
        if not bias:
            causal = getattr(module, "causal", False)
            return query, key, value, self.documents.causal if causal else self.documents.same
        return query, key, value, bias[0] + (~self.documents.same).to(bias[0].dtype) * MASKED


@dataclass
class _Positions:
    """After a module that gives a row for each position [T, D]: the rows [B, T, D] of positions in the documents."""

    documents: _Documents

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output[self.documents.positions]


def _attach(module: nn.Module, layout: Layout, end: int) -> None:
    documents = _Documents()
    first = module.get_submodule(layout.sequence(module)[0]) if layout.order else module
    first.register_forward_pre_hook(_Find(documents, end))
    for _, core in matching(module, layout.attention):
        core.register_forward_pre_hook(_Mask(documents))
    for _, positions in matching(module, layout.positions):
        if not isinstance(positions, Rotations):  # only distances count there
            positions.register_forward_hook(_Positions(documents))
