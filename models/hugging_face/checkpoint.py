"""A published checkpoint under our names: `open_checkpoint` reads tensors or parts of them, `write` makes such a folder."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch

from edge_client.files import make_folder, write_durably
from models.hugging_face import config as configs
from models.hugging_face.config import CONFIG, INDEX, WEIGHTS
from models.hugging_face.folder import Folder, Shape, Slices, open_folder
from models.hugging_face.names import Located, Source, locate, sources
from models.options import JobError

Array = npt.NDArray[np.float32]

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file of weights, as transformers has it; a larger tensor has one of its own."""
_NEVER = -1e4
"""Logit bias of the mask, which BERT never predicts here."""
_UNTIED_BIAS = "cls.predictions.decoder.bias"


class Checkpoint:
    """The tensors of a folder by our names.

    Attributes:
        description: of the model.
    """

    def __init__(self, description: configs.Description, folder: Folder, located: Located) -> None:
        self.description = description
        self._folder = folder
        self._sources = located.found

    @property
    def shapes(self) -> dict[str, Shape]:
        return {
            ours: source.shape(self._folder.shapes[name]) for ours, (source, name) in self._sources.items()
        }

    def read(self, name: str, slices: Slices = ()) -> torch.Tensor:
        """A tensor of ours, or a part of it by slices of its first dims with step 1, as float32; reads only that part."""
        source, theirs = self._sources[name]
        values = self._folder.read(theirs, source.box(self._folder.shapes[theirs], slices))
        return values.T if source.transposed else values

    def mismatches(self, expected: Mapping[str, Shape]) -> list[str]:
        """One phrase for each of these tensors that is missing here or has another shape: file, found, expected."""
        shapes = self.shapes
        problems = [
            f"tensor {name!r} of the model is not there" for name in sorted(expected.keys() - shapes.keys())
        ]
        return problems + [
            f"{self._place(name)} is {list(shapes[name])} as {name!r}, expected {list(expected[name])}"
            for name in sorted(shapes.keys() & expected.keys())
            if shapes[name] != expected[name]
        ]

    def _place(self, name: str) -> str:
        theirs = self._sources[name][1]
        return f"{self._folder.tensors[theirs].path.name}: tensor {theirs!r}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors.

    Raises:
        JobError: as `config.read` and `open_folder`; or tensors are missing or unknown.
    """
    description, folder = configs.read(path), open_folder(path)
    located = locate(description.family, description.described(), folder.names)
    if problems := located.problems(description.family, lambda name: f"{folder.tensors[name].path.name}: "):
        raise JobError(f"{path}: {problems}")
    return Checkpoint(description, folder, located)


def write(
    path: Path,
    described: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    read: Callable[[str], Array],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Writes a model as a folder that transformers loads. Holds one file of weights in memory.

    Args:
        path: new or empty.
        described: the model as job files describe it, with complete options.
        shapes: of its tensors, by name.
        read: a tensor by its name, float32.

    Returns:
        The config, and the `files` of weights.

    Raises:
        JobError: no published architecture is this model.
    """
    config = configs.write(described)
    make_folder(path)
    theirs = _grouped(sources(config["model_type"], described), shapes, config["vocab_size"])
    sizes = {name: 4 * int(np.prod(tensor.shape)) for name, tensor in theirs.items()}
    groups = list(_shards(sizes, shard_bytes))
    total = len(groups)
    files: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = WEIGHTS if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        content = safetensors.numpy.save({name: theirs[name].read(read) for name in group}, {"format": "pt"})
        write_durably(path / file, content)
        files |= dict.fromkeys(group, file)
    if total > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(files.items()))}
        write_durably(path / INDEX, _json(index))
    write_durably(path / CONFIG, _json(config))
    return {"config": config, "files": sorted(set(files.values()))}


class _Theirs:
    """A tensor of the folder, made of ours. `rows`: of its first dim, where ours may have fewer; 0: as many."""

    def __init__(
        self, parts: list[tuple[str, Source]], shape: Shape, rows: int = 0, fill: float = 0.0
    ) -> None:
        self._parts, self._fill, self._ours = parts, fill, shape
        self.shape = (rows, *shape[1:]) if rows else shape

    def read(self, read: Callable[[str], Array]) -> Array:
        found = [read(name).T if source.transposed else read(name) for name, source in self._parts]
        joined = np.concatenate(found, -1) if found else np.zeros(self._ours, np.float32)
        missing = self.shape[0] - len(joined)
        padding = np.full((missing, *self.shape[1:]), self._fill, np.float32)
        return np.ascontiguousarray(
            np.concatenate([joined, padding]) if missing else joined, dtype=np.float32
        )


def _grouped(ours: Mapping[str, Source], shapes: Mapping[str, Shape], vocab: int) -> dict[str, _Theirs]:
    """Their tensors by name. Biases that ours lack are zero, and rows of a head that ours lack are never predicted."""
    groups: dict[str, list[tuple[str, Source]]] = defaultdict(list)
    for name, source in ours.items():
        groups[source.name].append((name, source))
    found = {}
    for theirs, parts in groups.items():
        parts.sort(key=lambda part: part[1].part)
        present = [(name, source) for name, source in parts if name in shapes]
        like = parts if len(present) == len(parts) else _weights_of(parts)
        shape = _joined([shapes[name] for name, _ in like], like[0][1].transposed)
        if not present:
            found[theirs] = _Theirs([], shape[-1:])
        elif present != parts:
            raise JobError(
                f"tensor {theirs!r} has only some of its parts: {', '.join(name for name, _ in present)}"
            )
        else:
            head = theirs.startswith("cls.predictions.") and theirs.rpartition(".")[0].endswith(
                ("predictions", "decoder")
            )
            found[theirs] = _Theirs(present, shape, vocab if head else 0, _NEVER if len(shape) == 1 else 0.0)
    if _UNTIED_BIAS in found:  # transformers has it twice
        found["cls.predictions.bias"] = found[_UNTIED_BIAS]
    return found


def _weights_of(parts: list[tuple[str, Source]]) -> list[tuple[str, Source]]:
    """The matrices, as the file has them, whose biases these are."""
    return [(f"{name.removesuffix('bias')}weight", Source("", transposed=True)) for name, _ in parts]


def _joined(shapes: list[Shape], transposed: bool) -> Shape:
    turned = [shape[::-1] if transposed else shape for shape in shapes]
    return (*turned[0][:-1], sum(shape[-1] for shape in turned))


def _shards(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    group: list[str] = []
    for name in sorted(sizes):
        if group and sum(map(sizes.__getitem__, group)) + sizes[name] > most:
            yield group
            group = []
        group.append(name)
    yield group


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()
