"""The engine of a run's PyTorch clients in a worker: whether it can train the model here, and its trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.errors import UserError
from coordinator.experiments.engines import PRIVATE_ROWS, Engine, of_chain
from coordinator.workers.training import ClientTasks, ClientTrainer, OneByOne, Stack
from coordinator.workers.workspace_arrays import Workspace
from edge_client.data.examples import Examples
from edge_client.files import default_cache_dir
from edge_client.train.torch_trainer import TorchRuntime, read
from edge_client.train.trainer import Trainer, TrainTask

if TYPE_CHECKING:
    from models.zoo import KerasSpec, ModelSpec

_TOLERANCE = 1e-3


def choose_engine(engine: str, spec: ModelSpec | KerasSpec, batch_size: int) -> dict[str, str]:
    """`engine`, what an experiment means, "auto" by the layers of the model, and `why` this machine cannot use it, as `require_engine`.

    Raises:
        UserError: as `require_engine`.
    """
    if engine == "auto":
        engine = _of_layers(spec)
    why = "" if engine == "pool" else require_engine(engine, spec, batch_size)
    return {"engine": engine, "why": why}


def _of_layers(spec: ModelSpec | KerasSpec) -> Engine:
    from coordinator.workers.kernels.layer_chain import Kind, NotStackable, find_chain
    from models.zoo import KerasSpec

    if isinstance(spec, KerasSpec):
        return "pool"
    try:
        chain = find_chain(spec, spec.build(0))
        is_dense = all(layer.kind in (Kind.DENSE, Kind.FLATTENING) for layer in chain.layers)
        widths = [layer.sizes[1] for layer in chain.layers if layer.kind == Kind.DENSE]
        engine = of_chain(widths[:-1] if is_dense else None)
        if engine == "stacked":
            _require_same_steps(make_trainer(engine, spec, 1), spec)
    except NotStackable:
        return "pool"
    return engine


def require_engine(engine: str, spec: ModelSpec | KerasSpec, batch_size: int) -> str:
    """Why this machine cannot use the engine, so that "pool" does the work; empty if it can. `engine`: or `PRIVATE_ROWS`.

    Raises:
        UserError: the engine cannot train this model on any machine, or this one has no GPU for "cuda".
    """
    from coordinator.workers.kernels.layer_chain import NotStackable
    from coordinator.workers.kernels.native import CannotCompile
    from coordinator.workers.kernels.vmapped import NoDevice
    from models.zoo import KerasSpec

    if engine == PRIVATE_ROWS:
        from coordinator.workers.kernels.row_gradients import require_row_gradients

        return require_row_gradients(spec)
    refusal = f'simulation.engine = "{engine}" cannot train model.name = {spec.name!r}: '
    if isinstance(spec, KerasSpec):
        raise UserError(f'{refusal}it is a Keras model; take "pool"')
    try:
        trainer = make_trainer(engine, spec, batch_size)
        if engine != "compiled":
            _require_same_steps(trainer, spec)
    except NotStackable as error:
        raise UserError(f'{refusal}{error}; take "pool" or "compiled"') from None
    except NoDevice as error:
        raise UserError(f'simulation.engine = "{engine}": {error}; take "pool" or "auto"') from None
    except CannotCompile as error:
        return str(error)
    return ""


def make_trainer(engine: str, spec: ModelSpec, batch_size: int) -> ClientTrainer:
    """How PyTorch clients train.

    Raises:
        NotStackable: the model is no chain of dense layers, or for "cuda" none whose steps PyTorch can vectorise.
        NoDevice: there is no GPU here for "cuda".
        CannotCompile: there is no compiler here, or it does not get the model right.
    """
    if engine == "stacked":
        from coordinator.workers.kernels.dense_chain import find_chain
        from coordinator.workers.kernels.stacked import StackedTrainer

        return StackedTrainer(find_chain(spec, spec.build(0)))
    if engine == "cuda":
        from coordinator.workers.kernels.vmapped import VmapTrainer, open_device

        return VmapTrainer(spec, open_device())
    if engine == "compiled":
        return _compile(spec, batch_size, default_cache_dir() / "compiled")
    return OneByOne(TorchRuntime(spec.build(0), spec.loss))


def _compile(spec: ModelSpec, batch_size: int, cache: Path) -> ClientTrainer:
    """By code of our own, if it can take the model's steps, else by PyTorch's compiler.

    Raises:
        CannotCompile: there is no compiler here, or it does not get the model right.
    """
    from coordinator.workers.kernels.chain_steps import ChainRuntime, ChainTrainer
    from coordinator.workers.kernels.layer_chain import NotStackable, find_chain

    try:
        chain = find_chain(spec, spec.build(0))
    except NotStackable:
        from coordinator.workers.kernels.compiled import CompiledRuntime

        return OneByOne(CompiledRuntime(spec, batch_size, cache))
    return ChainTrainer(ChainRuntime(spec, chain, cache))


def _require_same_steps(trainer: ClientTrainer, spec: ModelSpec) -> None:
    """Two steps of a stack of one are those of the module itself, which may have hooks or other code that no graph shows.

    Raises:
        NotStackable: they are not.
    """
    from coordinator.workers.kernels.layer_chain import NotStackable

    module = spec.build(0)
    x, y = (tensor.numpy() for tensor in spec.example_batch(6))
    task, rows = TrainTask(seed=0, batch_size=4, lr=0.01, epochs=1), np.arange(len(x))
    params = read(module)
    expected = Trainer(TorchRuntime(module, spec.loss)).train(params, task, Examples(x, y)).update.delta
    nothing: Any = np.zeros(0, np.int64)
    data = Workspace(x, y, nothing, nothing, nothing, nothing, nothing)
    stack = trainer.train(params, ClientTasks(task, [""], [task.seed], [rows]), data)
    assert isinstance(stack, Stack)
    for name, delta in expected.items():
        if not np.allclose(
            stack.deltas[name][0], delta, rtol=_TOLERANCE, atol=_TOLERANCE * np.abs(delta).max()
        ):
            raise NotStackable(f"it does more than its layers show: {name} learns something else in a stack")
