"""Compiled blocks: torch.compile for every layer of a module, which fuses the operations between its matrix products.

It compiles blocks rather than the whole module because the collectives between them break the graph, and because
identical layers are compiled once. Where compilation is impossible the layers stay as they are, with a warning.
"""

from __future__ import annotations

import shutil
import warnings

import torch
from torch import nn

from models.zoo.layout import Layout


def compile_blocks(module: nn.Module, layout: Layout, device: torch.device) -> None:
    """Compiles the layers of `module` in place, when they first run."""
    reason = missing_compiler(device)
    if reason:
        warnings.warn(f"compile=true: {reason}; blocks run uncompiled", RuntimeWarning, stacklevel=2)
        return
    for name in layout.layer_names(module):
        module.get_submodule(name).compile()


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks here to generate code for `device`; empty if nothing."""
    if device.type == "cuda":
        return "" if torch.utils._triton.has_triton() else "Triton is not installed"
    from torch._inductor import config

    named = config.cpp.cxx
    compilers = [name for name in (named if isinstance(named, tuple | list) else (named,)) if name]
    if any(shutil.which(name) for name in [*compilers, "g++"]):
        return ""
    return "there is no C++ compiler on this machine"
