"""TensorFlow for training: `from edge_client.train.tensorflow_import import tf`.

`import tensorflow` also imports scikit-learn, matplotlib and jax where they are installed, for a Keras wrapper, Keras' plots
and a converter from jax. Nobody needs those for training. Without them a process starts in 60 % of the CPU time and holds
190 MiB less (TensorFlow 2.21).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UNUSED = ("sklearn", "matplotlib", "jax")


@contextmanager
def _absent(names: tuple[str, ...]) -> Iterator[None]:
    """Modules that are not imported yet seem not installed, which TensorFlow and Keras allow; later imports work."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# TensorFlow reads these once, at import. Without them every process logs its CPU features. oneDNN logs at any level
# and rounds differently on different CPUs; enabling it makes larger convolutions about 1.4 times faster.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
with _absent(_UNUSED):
    import tensorflow as tf

__all__ = ["tf"]
