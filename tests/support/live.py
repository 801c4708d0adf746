"""How many bytes of tensors are alive that operators made, whoever keeps them: autograd, a list, a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """While entered, sees every tensor that an operator gives. Storages count once, those of `modules`' params never."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        super().__init__()
        self._known = {_local(p).untyped_storage()._cdata for m in modules for p in m.parameters()}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        operator: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(answer):
            if isinstance(leaf, torch.Tensor):
                storage = _local(leaf).untyped_storage()
                if storage._cdata not in self._known:
                    self._seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return answer

    def bytes(self) -> int:
        """Those alive now."""
        gc.collect()
        return sum(size for storage, size in self._seen.values() if not storage.expired())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)
