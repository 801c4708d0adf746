"""The names of data sets: which there are, whose rows anyone may have, and which are a user's own code."""

from __future__ import annotations

from pathlib import Path

from edge_client.data.contract import TABLE_SUFFIXES
from models import user_code
from models.datasets import notation
from models.datasets.dataset import DataError
from models.datasets.shipped import synthetic, synthetic_clients
from strategies.suggestions import suggest

NAMES = ("digits", "mnist", "shakespeare", "phrasebank", "csv", "npz", "synthetic")
"""Besides these, a name may be a user's own `package.module:load`."""

KEYS = (
    "dataset",
    "path",
    "label",
    "site",
    "split",
    "features",
    "exclude",
    "encoding",
    "scale",
    "fixed",
    "units",
    "categories",
    "task",
    "length",
    "vocab",
)
"""The keys of an experiment's `[data]` that say which data set it is and how it is read."""
PUBLIC_NAMES = ("digits", "mnist", "shakespeare", "phrasebank", "synthetic")
"""Of `NAMES` those whose rows anyone may have: they are published, or made up."""


def is_public(name: str, path: object = None) -> bool:
    """Whether this data is public: a published or synthetic set by its name, not a file `path`."""
    return path is None and not is_code(name) and name.partition("(")[0].strip() in PUBLIC_NAMES


FILE_KINDS = {**dict.fromkeys(TABLE_SUFFIXES, "csv"), ".npz": "npz"}
"""What a file holds, by its ending."""


def loaded_as(name: str, path: str | None) -> str:
    """What a data set is loaded as: a name of one's own with a file `path` as what the file holds; any other as itself."""
    if path is None or is_code(name) or name.partition("(")[0].strip() in NAMES:
        return name
    return FILE_KINDS.get(Path(path).suffix.lower(), name)


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
            f"data set {call.name!r} is unknown{suggest(call.name, NAMES)}; known: {', '.join(NAMES)}; "
            f"your own is given as package.module:function, or by data.path, a file named {', '.join(FILE_KINDS)}"
        )
    if call.name == "synthetic" and call.positional:
        synthetic_clients.options(call)
    elif call.name == "synthetic":
        synthetic.options(call)
    elif call.positional or call.named:
        raise DataError(f"data set {call.name!r} takes no options in brackets, got {name!r}")
