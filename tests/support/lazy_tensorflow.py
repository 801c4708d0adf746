"""TensorFlow imported by the first test that needs it: two seconds and 300 MB in each worker that collects tests."""

from __future__ import annotations

import functools
import importlib
from typing import Any


class _Lazy:
    """A module, or what it has at a path of names."""

    def __init__(self, module: str, *path: str) -> None:
        self._module = module
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return functools.reduce(getattr, (*self._path, name), importlib.import_module(self._module))


_IMPORT = "edge_client.train.tensorflow_import"
tf, keras, layers = (
    _Lazy(_IMPORT, "tf"),
    _Lazy(_IMPORT, "tf", "keras"),
    _Lazy(_IMPORT, "tf", "keras", "layers"),
)
trainer = _Lazy("edge_client.train.tensorflow_trainer")
