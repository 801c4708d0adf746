"""Records what a model's constructor computes, without the memory for it, so that each process replays its part.

    module, program = record(spec.module)    # module: on the meta device
    program.replay(seed, {storage: deliver}) # the values that `spec.build(seed)` gives, one tensor at a time

Torch's CPU generator cannot skip numbers, so a replay draws every random number of the constructor, in order. A tensor
is allocated at the first operation whose result matters and freed after the last: those that this process does not
keep, and first drafts that are overwritten later, live for one operation.

A constructor whose values cannot be reproduced so raises `Unrecordable`: one that reads values of tensors, seeds torch
itself, passes its own generator, or keeps tensors that are neither params nor buffers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META = torch.device("meta")
_aten = torch.ops.aten
_OVERWRITES = {
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
    _aten.exponential_.default,
    _aten.bernoulli_.float,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.copy_.default,
}
"""Operations whose first argument is written and not read."""
_SMALL = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step, _aten.linspace.default}
"""Factories whose results are computed at once: constructors read values from them, and they are small."""
_SMALL_LIMIT = 65_536


class Unrecordable(Exception):
    """The constructor's values cannot be reproduced from a record; says why."""


@dataclass(frozen=True)
class Ref:
    """A tensor: a view of storage number `storage`; `whole` if it covers all of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool


@dataclass(frozen=True)
class Operation:
    """One call. `args` and `kwargs` have a `Ref` for every tensor; `created`: position among the flattened results, and
    storage, of each tensor with new memory."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    created: tuple[tuple[int, int], ...]
    written: frozenset[int]
    read: frozenset[int]
    random: bool

    @property
    def defined(self) -> frozenset[int]:
        """Storages whose earlier contents do not matter after it."""
        return (self.written - self.read) | {storage for _, storage in self.created}


Deliver = Callable[[Callable[[Ref], torch.Tensor]], None]
"""Receives a storage's final contents, as a function from a `Ref` into it to the tensor; must copy what it keeps."""


class Program:
    """The operations of a constructor, in order.

    Attributes:
        constants: real tensors that operations read, by storage.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.sizes: dict[int, int] = {}
        self.constants: dict[int, torch.Tensor] = {}

    def replay(self, seed: int, wanted: Mapping[int, Deliver]) -> None:
        """Computes the storages in `wanted` with the random numbers of `seed`, and delivers each when it is final.

        Holds those that are not final yet. Does not change torch's global generator.
        """
        freed, needed = self._liveness(frozenset(wanted))
        last_write = {
            storage: index
            for index in needed
            for storage in self.operations[index].written | self.operations[index].defined
            if storage in wanted
        }
        memory: dict[int, torch.UntypedStorage] = {}

        def view(ref: Ref) -> torch.Tensor:
            if ref.storage not in memory:
                constant = self.constants.get(ref.storage)
                memory[ref.storage] = (
                    torch.UntypedStorage(self.sizes[ref.storage])  # type: ignore[no-untyped-call]
                    if constant is None
                    else constant.untyped_storage()
                )
            return torch.empty(0, dtype=ref.dtype).set_(memory[ref.storage], ref.offset, ref.size, ref.stride)

        pending = set(last_write)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for index in needed:
                operation = self.operations[index]
                args, kwargs = tree_map(
                    lambda each: view(each) if isinstance(each, Ref) else each,
                    (operation.args, operation.kwargs),
                )
                results = tree_leaves(operation.function(*args, **kwargs))
                for position, storage in operation.created:
                    memory[storage] = results[position].untyped_storage()
                del args, kwargs, results
                for storage in [each for each in pending if last_write[each] == index]:
                    wanted[storage](view)
                    pending.discard(storage)
                for storage in freed[index]:
                    memory.pop(storage, None)
                if not pending:
                    break
        for storage in wanted.keys() - last_write.keys():  # uninitialised memory, or a constant
            wanted[storage](view)
            memory.pop(storage, None)

    def _liveness(self, wanted: frozenset[int]) -> tuple[list[frozenset[int]], list[int]]:
        """For each operation the storages that nothing uses after it; and the operations to run, in order."""
        freed: list[frozenset[int]] = [frozenset()] * len(self.operations)
        live: set[int] = set()  # a wanted storage is freed after its last use: it was delivered by then
        unfinished = set(wanted)
        needed = []
        for index in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[index]
            touched = operation.written | operation.read | {storage for _, storage in operation.created}
            useful = touched & (live | unfinished) & (operation.written | operation.defined)
            if not (operation.random or useful):
                continue
            needed.append(index)
            freed[index] = frozenset(touched - live)
            unfinished -= operation.written | operation.defined
            live -= operation.defined
            live |= operation.read
        return freed, needed[::-1]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations on the meta device and records them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.generator = torch.get_rng_state()
        # keeps every storage, so that none has the address of an earlier one
        self._storages: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        random = torch.Tag.nondeterministic_seeded in func.tags
        if kwargs.get("generator") is not None:
            raise Unrecordable("its constructor passes a random generator of its own")
        if random and not torch.equal(torch.get_rng_state(), self.generator):
            raise Unrecordable("its constructor seeds torch, or draws numbers outside operations on tensors")
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.device.type not in ("cpu", "meta") for each in inputs):
            raise Unrecordable("its constructor uses tensors on other devices")
        if not random and self._is_eager(func, args, kwargs, inputs):
            return func(*args, **kwargs)
        return self._record(func, args, kwargs, inputs, random)

    def _is_eager(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
        """Whether to compute it now: small factories, and what has only real inputs, such as `torch.tensor` of a list."""
        if inputs:
            return not any(each.is_meta for each in inputs)
        if func not in _SMALL:
            return False
        with torch._C._DisableTorchDispatch():
            return int(func(*args, **{**kwargs, "device": _META}).numel()) <= _SMALL_LIMIT

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], random: bool) -> Any:
        if func is _aten._local_scalar_dense.default:
            raise Unrecordable("its constructor reads the value of a tensor")
        refs: dict[int, Ref] = {id(each): self.ref(each) for each in inputs}
        written: set[int] = set()
        for argument, value in _arguments(func, args, kwargs):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in tree_leaves(value):
                    if isinstance(each, torch.Tensor):
                        if not each.is_meta:
                            raise Unrecordable("its constructor changes a tensor of given values")
                        written.add(refs[id(each)].storage)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            raise Unrecordable(f"its constructor creates tensors on {device}")
        on_meta = dict(kwargs)
        if any(argument.name == "device" for argument in func._schema.arguments) and (
            not inputs or device is not None
        ):
            on_meta["device"] = _META
        try:
            result = func(*_to_meta(args), **_to_meta(on_meta))
        except (NotImplementedError, RuntimeError) as error:
            raise Unrecordable(f"its constructor calls {func}: {str(error).splitlines()[0]}") from error
        known = {ref.storage for ref in refs.values()}
        created = []
        for position, each in enumerate(tree_leaves(result)):
            if isinstance(each, torch.Tensor) and (number := self.ref(each).storage) not in known:
                created.append((position, number))
        if not (created or written):
            return result  # a view
        symbolic = tree_map(
            lambda each: refs[id(each)] if isinstance(each, torch.Tensor) else each, (args, kwargs)
        )
        if device is not None:
            symbolic[1]["device"] = torch.device("cpu")
        first = refs[id(args[0])] if args and isinstance(args[0], torch.Tensor) else None
        overwrites = func in _OVERWRITES and first is not None and first.whole
        others = [refs[id(each)] for each in inputs[1:]] if overwrites else list(refs.values())
        self.program.operations.append(
            Operation(
                func,
                symbolic[0],
                symbolic[1],
                tuple(created),
                frozenset(written),
                frozenset(ref.storage for ref in others),
                random,
            )
        )
        return result

    def ref(self, tensor: torch.Tensor) -> Ref:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
            self.program.sizes[number] = storage.nbytes()
            if not tensor.is_meta:
                self.program.constants[number] = tensor
        whole = tensor.numel() * tensor.element_size() == storage.nbytes() and not tensor.storage_offset()
        return Ref(
            self._numbers[storage._cdata],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            whole,
        )

    def escaped(self, kept: Iterable[torch.Tensor]) -> bool:
        """Whether anything but the tensors in `kept` still uses one of the meta storages."""
        users: dict[int, int] = {}
        for tensor in {id(each): each for each in kept}.values():
            address = tensor.untyped_storage()._cdata
            users[address] = users.get(address, 0) + 1

        def found() -> bool:
            return any(
                torch._C._storage_Use_Count(storage._cdata) > 1 + users.get(storage._cdata, 0)
                for storage in self._storages
                if storage.device.type == "meta"
            )

        if not found():
            return False
        gc.collect()
        return found()


class _AsOnCpu(TorchFunctionMode):
    """Tells the constructor that its tensors are on the CPU: torch's own initialisers skip those on the meta device."""

    _ANSWERS: Mapping[str, Any] = {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for name, answer in self._ANSWERS.items():
            if func == getattr(torch.Tensor, name).__get__:
                return answer
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Recorded:
    """A module on the meta device, and how its tensors get their values.

    Attributes:
        refs: of every parameter and buffer, by each of its names.
    """

    module: nn.Module
    program: Program
    refs: Mapping[str, Ref]


def record(constructor: Callable[[], nn.Module]) -> Recorded:
    """Runs `constructor`, which creates a module on the CPU, without allocating its tensors.

    Raises:
        Unrecordable: replaying would not give the same values.
    """
    with torch.random.fork_rng(devices=[]):
        # a state that seeding inside of the constructor does not arrive at
        torch.manual_seed(torch.seed())
        torch.rand(1)
        recorder = _Recorder()
        try:
            with _AsOnCpu(), recorder:
                module = constructor()
        except Unrecordable:
            raise
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unrecordable(f"its constructor needs values: {reason}") from error
        if not torch.equal(torch.get_rng_state(), recorder.generator):
            raise Unrecordable("its constructor seeds torch, or draws numbers outside operations on tensors")
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )
    if recorder.escaped(tensors.values()):
        raise Unrecordable("it keeps tensors that are neither parameters nor buffers")
    refs = {name: recorder.ref(tensor) for name, tensor in tensors.items()}
    _drop_values(module)
    return Recorded(module, recorder.program, refs)


def held_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers of `module` itself, without those of its submodules."""
    return module._parameters, module._buffers


def _drop_values(module: nn.Module) -> None:
    """Replaces tensors that were computed already by some without memory, tied ones by the same."""
    dropped: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for held in held_tensors(part):
            for name, tensor in list(held.items()):
                if tensor is None or tensor.is_meta:
                    continue
                if id(tensor) not in dropped:
                    meta = tensor.detach().to(_META)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    dropped[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                setattr(part, name, dropped[id(tensor)])


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[tuple[Any, Any]]:
    """The arguments of a call, each with its declaration."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _to_meta(values: Any) -> Any:
    return tree_map(
        lambda each: each.to(_META) if isinstance(each, torch.Tensor) and not each.is_meta else each, values
    )
