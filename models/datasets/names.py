"""The names of data sets: which there are, whose rows anyone may have, and which are a user's own code."""

from __future__ import annotations

from models import user_code
from models.datasets import notation
from models.datasets.dataset import DataError
from models.datasets.shipped import synthetic
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
            "your own is given as package.module:function"
        )
    if call.name == "synthetic":
        synthetic.options(call)
    elif call.positional or call.named:
        raise DataError(f"data set {call.name!r} takes no options in brackets, got {name!r}")
