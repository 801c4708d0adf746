"""Where each tensor of ours is in a published checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIXES = {"gpt2": "transformer.", "llama": "model.", "qwen2": "model.", "bert": "bert."}
"""Of the names of the body's tensors, where there is a head; a body alone leaves it out."""

_IGNORED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "embeddings.position_ids")
"""Ends of names of constants, which older files have."""
_OTHER_HEADS = ("cls.seq_relationship.", "pooler.", "cls.predictions.")
"""Parts of BERT for other objectives than the one that is read."""
_LISTED = 5


@dataclass(frozen=True)
class Source:
    """A tensor of ours in a file.

    Attributes:
        name: of the file's tensor.
        transposed: whether it is transposed there, as matrices of GPT-2 are.
        part, parts: ours is one of so many equal parts of its last dim, before it is transposed.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def shape(self, theirs: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of ours, given that of the file's tensor."""
        part = (*theirs[:-1], theirs[-1] // self.parts) if theirs else ()
        return part[::-1] if self.transposed else part

    def box(self, theirs: tuple[int, ...], slices: tuple[slice, ...] = ()) -> tuple[slice, ...]:
        """Where ours, or a part of it by slices of its first dims with step 1, is in the file's tensor; not yet transposed."""
        if not theirs:
            return ()
        shape = self.shape(theirs)
        full = [slice(*each.indices(size)) for each, size in zip(slices, shape, strict=False)]
        full += [slice(0, size) for size in shape[len(full) :]]
        if self.transposed:
            full.reverse()
        offset = self.part * (theirs[-1] // self.parts)
        full[-1] = slice(full[-1].start + offset, full[-1].stop + offset)
        return tuple(full)


@dataclass(frozen=True)
class Located:
    """The tensors of a model among those of files.

    Attributes:
        found: by our names: how, and in which tensor of the files.
        missing: the files lack these, by their canonical names.
        unknown: the files' names of tensors that the model does not have.
    """

    found: Mapping[str, tuple[Source, str]]
    missing: list[str]
    unknown: list[str]

    def problems(self, family: str, place: Callable[[str], str] = lambda name: "") -> str:
        """What is missing and unknown, in words; empty if nothing is. `place`: of a tensor of the files, before its name."""
        problems = [f"tensor {name!r} is missing" for name in self.missing]
        problems += [
            f"{place(name)}tensor {name!r} is none of a {family} with this config.json"
            for name in self.unknown
        ]
        more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        return "; ".join(problems[:_LISTED]) + more


def locate(family: str, described: Mapping[str, Any], names: Iterable[str]) -> Located:
    """Where the tensors of the model of `family` that this describes are among the files' tensors `names`."""
    theirs = {canonical(name, family): name for name in sorted(names)}
    ours = sources(family, described)
    wanted = {source.name for source in ours.values()}
    found = {name: (source, theirs[source.name]) for name, source in ours.items() if source.name in theirs}
    unknown = [theirs[name] for name in sorted(theirs.keys() - wanted) if not is_ignored(name, family)]
    return Located(found, sorted(wanted - theirs.keys()), unknown)


def sources(family: str, described: Mapping[str, Any]) -> dict[str, Source]:
    """The sources of all tensors of the model of `family` that this describes, by our names."""
    pairs = {"gpt2": _gpt2, "llama": _llama, "qwen2": _llama, "bert": _bert}[family]
    return dict(pairs(described["options"], PREFIXES[family]))


def canonical(name: str, family: str) -> str:
    """The name of a file's tensor as `sources` has it: of older files, and of a body without a head."""
    name = name.removesuffix(".gamma") + ".weight" if name.endswith(".gamma") else name
    name = name.removesuffix(".beta") + ".bias" if name.endswith(".beta") else name
    prefix = PREFIXES[family]
    heads = ("lm_head.", "cls.", "classifier.", prefix)
    return name if name.startswith(heads) else f"{prefix}{name}"


def is_ignored(name: str, family: str) -> bool:
    """Whether a tensor of a file, by its canonical name, is none of the model's own: a constant, or of another head."""
    if name.endswith(_IGNORED):
        return True
    if name == "lm_head.weight":  # of a tied model, that is its embedding
        return True
    return family == "bert" and name.removeprefix(PREFIXES[family]).startswith(_OTHER_HEADS)


def _gpt2(options: Mapping[str, Any], body: str) -> Iterator[tuple[str, Source]]:
    yield "embedding.token.weight", Source(f"{body}wte.weight")
    yield "embedding.position.weight", Source(f"{body}wpe.weight")
    for layer in range(options["layers"]):
        ours, theirs = f"layers.{layer}", f"{body}h.{layer}"
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            for norm, name in (("norm1", "ln_1"), ("norm2", "ln_2")):
                yield f"{ours}.{norm}.{kind}", Source(f"{theirs}.{name}.{kind}")
            for part, name in enumerate(("query", "key", "value")):
                yield (
                    f"{ours}.attention.{name}.{kind}",
                    Source(f"{theirs}.attn.c_attn.{kind}", matrix, part, 3),
                )
            yield f"{ours}.attention.out.{kind}", Source(f"{theirs}.attn.c_proj.{kind}", matrix)
            yield f"{ours}.mlp.up.{kind}", Source(f"{theirs}.mlp.c_fc.{kind}", matrix)
            yield f"{ours}.mlp.down.{kind}", Source(f"{theirs}.mlp.c_proj.{kind}", matrix)
    for kind in ("weight", "bias"):
        yield f"norm.{kind}", Source(f"{body}ln_f.{kind}")
    if not options["tie"]:
        yield "head.weight", Source("lm_head.weight")


def _llama(options: Mapping[str, Any], body: str) -> Iterator[tuple[str, Source]]:
    bias = options["bias"]
    biased = {"none": (), "qkv": "qkv", "attention": "qkvo", "all": ("q", "k", "v", "o", "mlp")}[bias]
    yield "embedding.token.weight", Source(f"{body}embed_tokens.weight")
    for layer in range(options["layers"]):
        ours, theirs = f"layers.{layer}", f"{body}layers.{layer}"
        yield f"{ours}.norm1.weight", Source(f"{theirs}.input_layernorm.weight")
        yield f"{ours}.norm2.weight", Source(f"{theirs}.post_attention_layernorm.weight")
        for name in ("query", "key", "value", "out"):
            for kind in ("weight", "bias") if name[0] in biased else ("weight",):
                yield f"{ours}.attention.{name}.{kind}", Source(f"{theirs}.self_attn.{name[0]}_proj.{kind}")
        for name in ("gate", "up", "down"):
            for kind in ("weight", "bias") if "mlp" in biased else ("weight",):
                yield f"{ours}.mlp.{name}.{kind}", Source(f"{theirs}.mlp.{name}_proj.{kind}")
    yield "norm.weight", Source(f"{body}norm.weight")
    if not options["tie"]:
        yield "head.weight", Source("lm_head.weight")


def _bert(options: Mapping[str, Any], body: str) -> Iterator[tuple[str, Source]]:
    for ours, theirs in (("token", "word"), ("position", "position"), ("token_type", "token_type")):
        yield f"embedding.{ours}.weight", Source(f"{body}embeddings.{theirs}_embeddings.weight")
    modules = {"embedding.norm": f"{body}embeddings.LayerNorm"}
    for layer in range(options["layers"]):
        ours, theirs = f"layers.{layer}", f"{body}encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            modules[f"{ours}.attention.{name}"] = f"{theirs}.attention.self.{name}"
        modules[f"{ours}.attention.out"] = f"{theirs}.attention.output.dense"
        modules[f"{ours}.norm1"] = f"{theirs}.attention.output.LayerNorm"
        modules[f"{ours}.mlp.up"] = f"{theirs}.intermediate.dense"
        modules[f"{ours}.mlp.down"] = f"{theirs}.output.dense"
        modules[f"{ours}.norm2"] = f"{theirs}.output.LayerNorm"
    if options["objective"] == "masked":
        modules["head.dense"] = "cls.predictions.transform.dense"
        modules["head.norm"] = "cls.predictions.transform.LayerNorm"
        if options["tie"]:
            yield "head.out.bias", Source("cls.predictions.bias")
        else:
            modules["head.out"] = "cls.predictions.decoder"
    else:
        modules |= {"head.pool": f"{body}pooler.dense", "head.out": "classifier"}
    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", Source(f"{theirs}.{kind}")
