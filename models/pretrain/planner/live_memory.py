"""Bytes of live tensors while code runs: what a GPU's allocator would report, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from models.pretrain.dtensor import local_tensor


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages from the operation that creates them until their last tensor is gone.

    Each counts once, however many tensors share it. It sees everything that passes torch's dispatcher, including the
    backward pass, but not the buckets of DistributedDataParallel, which C++ creates.

    Attributes:
        now, peak: bytes.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        for tensor in existing:
            self._storage(local_tensor(tensor).untyped_storage())

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._storage(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]  # FSDP2 frees params this way
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def reset_peak(self) -> None:
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes back here with the local tensors
        results = func(*args, **(kwargs or {}))
        for value in tree_flatten((args, kwargs, results))[0]:
            if isinstance(value, torch.Tensor):
                self._storage(local_tensor(value).untyped_storage())
        return results

    def _storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        if known is not None and known[0]() is not None:
            self.now += size - known[1]
            self._storages[key] = (known[0], size)
        else:
            self._storages[key] = (weakref.ref(storage, lambda _: self._gone(key)), size)
            self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        storage = self._storages.pop(key, None)
        if storage is not None:
            self.now -= storage[1]
