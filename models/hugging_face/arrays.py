"""The tensors of a published checkpoint under our names, all in memory. No framework here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from models.hugging_face.config import Description
from models.hugging_face.names import locate
from models.options import JobError

Array = npt.NDArray[Any]


def renamed(description: Description, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of the files of a folder that this describes, under our names, in our layout.

    Raises:
        JobError: tensors are missing or unknown.
    """
    located = locate(description.family, description.described(), tensors)
    if problems := located.problems(description.family):
        raise JobError(problems)
    found = {}
    for name, (source, theirs) in located.found.items():
        part = tensors[theirs][source.box(tensors[theirs].shape)]
        found[name] = np.ascontiguousarray(part.T if source.transposed else part)
    return found
