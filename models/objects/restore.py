"""Puts a torch module together again. Its function is copied into the source of a run's model."""

from __future__ import annotations

from typing import Any

import torch


def fedloop_restore(kind: Any, attributes: Any, params: Any, buffers: Any, parts: Any) -> Any:
    """A module of class `kind` without calling its constructor, whose arguments nobody knows any more.

    `params`: name -> parameter or None. `buffers`: name -> (tensor or None, whether it is saved). `parts`: submodules.
    """
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    vars(module).update(attributes)
    for name, param in params.items():
        module.register_parameter(name, param)
    for name, (buffer, is_saved) in buffers.items():
        module.register_buffer(name, buffer, persistent=is_saved)
    for name, part in parts.items():
        module.add_module(name, part)
    return module
