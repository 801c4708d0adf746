"""The data sets by name, and the one way to load them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_client.data.quoting import nearest
from models import user_code
from models.datasets import notation, own, table
from models.datasets.dataset import DataError, Dataset
from models.datasets.shipped import digits, mnist, phrasebank, shakespeare, synthetic

NAMES = ("digits", "mnist", "shakespeare", "phrasebank", "csv", "synthetic")
"""Besides these, a name may be a user's own `package.module:load`."""


PUBLIC_NAMES = ("digits", "mnist", "shakespeare", "phrasebank", "synthetic")
"""Of `NAMES` those whose rows anyone may have: they are published, or made up."""


def is_public(name: str, path: object = None) -> bool:
    """Whether this data is public: a published or synthetic set by its name, not a file `path`."""
    return path is None and not is_code(name) and name.partition("(")[0].strip() in PUBLIC_NAMES


def load(
    name: str,
    *,
    data_dir: Path | None = None,
    seed: int = 0,
    clients: int | None = None,
    path: Path | str | None = None,
    label: str = "label",
    site: str | None = None,
    split: str | None = None,
    features: Sequence[str] | None = None,
    length: int = 32,
    vocab: int = 2048,
) -> Dataset:
    """All rows of a data set. Equal arguments give equal bytes.

    Args:
        name: one of `NAMES`, `synthetic(shape=[…], classes=…, samples=…)`, or `package.module:load`.
        data_dir: where downloaded files lie; the current folder when None.
        seed: of what is held out, and of synthetic data.
        clients: how many clients synthetic data is to serve.
        path: of a csv; `label`, `site`, `split` and `features` name its columns (see `table.load`).
        length: tokens in a row of text.
        vocab: word ids of phrasebank, padding and unknown words included.

    Raises:
        DataError: unknown name, missing or damaged file, or wrong content; names the place and what to do.
    """
    check_name(name)
    if is_code(name):
        return own.load(name, data_dir, seed)
    if length < 1 or vocab <= phrasebank.FIRST_WORD:
        raise DataError(
            f"length = {length}, vocab = {vocab}: expected at least 1 and {phrasebank.FIRST_WORD + 1}"
        )
    call = notation.parse(name)
    match call.name:
        case "digits":
            return digits.load(seed)
        case "mnist":
            return mnist.load(data_dir, seed)
        case "shakespeare":
            return shakespeare.load(data_dir, length)
        case "phrasebank":
            return phrasebank.load(data_dir, seed, length, vocab)
        case "synthetic":
            return synthetic.load(call, clients, seed)
    if path is None:
        raise DataError("data set 'csv' needs `path`, the table to read")
    return table.load(Path(path), seed, label=label, site=site, split=split, features=features)


def is_code(name: str) -> bool:
    """Whether a data set of this name is code of a user, to be imported."""
    return ":" in name and "(" not in name


def check_name(name: str) -> None:
    """Checks a data set's name without reading any file.

    Raises:
        DataError: an unknown name, with the nearest known; or options that do not parse or are out of range.
    """
    if is_code(name):
        if not user_code.REFERENCE.fullmatch(name):
            raise DataError(f"data set {name!r} is not of the form package.module:function")
        return
    call = notation.parse(name)
    if call.name not in NAMES:
        raise DataError(
            f"data set {call.name!r} is unknown{nearest(call.name, NAMES)}; known: {', '.join(NAMES)}; "
            "your own is given as package.module:function"
        )
    if call.name == "synthetic":
        synthetic.options(call)
    elif call.positional or call.named:
        raise DataError(f"data set {call.name!r} takes no options in brackets, got {name!r}")
