"""Trains many clients as one batched computation on a GPU: the steps of any module, vectorised by `torch.func.vmap`.

A step of a small model leaves a GPU idle nearly all of the time: it waits for Python to launch one kernel after the other. Here a
step covers all clients of a stack, and its kernels are recorded once as a CUDA graph, which is launched as a whole. The steps are
those of `edge_client.train.torch_trainer`; results agree to float32 rounding.

A client's result depends, in its last bits, on the stack it is in, as in `coordinator.workers.kernels.stacked`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from coordinator.errors import UserError
from coordinator.workers.kernels.layer_chain import NotStackable
from coordinator.workers.kernels.layout import Layout, Work, lay_out
from coordinator.workers.training import ClientTasks, Stack, complete
from coordinator.workers.workspace_arrays import Workspace
from edge_client.train.torch_trainer import TorchRuntime, float_tensors, train_mode
from edge_client.train.trainer import LocalResult
from models.labels import filling
from models.zoo.spec import masked_cross_entropy, squared_error
from strategies.client_rules import CLIP_EPSILON
from strategies.params import Params, Tensors, copy_into

if TYPE_CHECKING:
    from models.zoo import ModelSpec

Weights = dict[str, torch.Tensor]

RESIDENT_SHARE = 4
"""Rows stay on the device if they take at most this part of its free memory; else each job sends its own."""


class NoDevice(Exception):
    """PyTorch has no GPU here; the message says which PyTorch this is."""


def open_device() -> torch.device:
    """The GPU, set to compute in float32 and to give the same bits each time.

    Raises:
        NoDevice: there is none.
    """
    if not torch.cuda.is_available():
        raise NoDevice(f"PyTorch {torch.__version__} finds no GPU on this machine")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as deterministic algorithms need it
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    return torch.device("cuda")


@dataclass
class _Step:
    """The memory of a step of `models` clients, and its kernels; the first slots of a stack share the stack's weights.

    Attributes:
        rows, labels: of the batches, [models, width, …]. `active`: bool [models]; a client that is done keeps its weights.
    """

    rows: torch.Tensor
    labels: torch.Tensor
    active: torch.Tensor
    losses: torch.Tensor
    graph: Any = None


@dataclass
class _Memory:
    """What stays on the device while stacks of the same shape train.

    Attributes:
        start: what all clients start from, [...]. `weights`, `velocity`: [models, ...]. `offset`: [models or 1, ...].
        lr, mu, momentum, clip: of the work, scalars, so that recorded kernels read them anew.
    """

    start: Weights
    weights: Weights
    velocity: Weights
    offset: Weights
    scalars: dict[str, torch.Tensor]
    steps: dict[int, _Step] = field(default_factory=dict)


class VmapTrainer:
    """A `ClientTrainer` of models whose steps PyTorch can vectorise.

    Raises:
        NotStackable: of this model it cannot.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        if spec.loss not in (masked_cross_entropy, squared_error):
            raise NotStackable(
                "it has a loss of its own; expected the default one, which does not count padding"
            )
        self._spec = spec
        self._device = device
        self._module = spec.build(0).to(device)
        train_mode(self._module)
        self._trainable = {n: p.detach() for n, p in self._module.named_parameters() if p.requires_grad}
        self._memories: dict[Any, _Memory] = {}
        self._data: tuple[Workspace, torch.Tensor, torch.Tensor] | None = None

    def train(self, params: Params, clients: ClientTasks, data: Workspace) -> Iterable[LocalResult] | Stack:
        """Results in the order of the clients, which all have the same local work and rule.

        Raises:
            NoExamples: a client has no rows.
            NotStackable: PyTorch cannot vectorise a step of this model.
            UserError: the GPU has too little memory for so many clients.
        """
        task, corrections = clients.task, clients.begin()
        work = Work.of(task, corrections[0])
        layout = lay_out(clients.rows, clients.seeds, work)
        offsets = [each.offset for each in corrections if each.offset is not None]
        memory = self._memory(layout, work, bool(offsets))
        self._load(params, memory, work, [offsets[at] for at in layout.order] if offsets else [])
        try:
            losses = self._take_steps(layout, memory, work, data)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise UserError(
                    f'simulation.engine = "cuda": the GPU has too little memory to train {len(clients)} clients at once; take a smaller '
                    'local.batch_size, fewer federation.clients_per_round, or "pool"'
                ) from error
            raise NotStackable(
                f"PyTorch cannot vectorise its step ({str(error).strip().splitlines()[0]})"
            ) from error
        stack = _finish(memory, layout, losses)
        if not task.transforms(corrections[0]):
            return stack
        return complete(stack, clients, corrections)

    def _memory(self, layout: Layout, work: Work, has_offsets: bool) -> _Memory:
        """Memory for stacks of this shape. Only that of the last shapes is kept: most rounds are alike."""
        models, width = layout.rows.shape[1:]
        key = (models, width, bool(work.mu), bool(work.momentum), bool(work.clip_grad_norm), has_offsets)
        if key not in self._memories:
            self._memories = dict(list(self._memories.items())[-1:])

            def stacked() -> Weights:
                return {
                    name: torch.zeros((models, *each.shape), device=self._device)
                    for name, each in self._trainable.items()
                }

            self._memories[key] = _Memory(
                {name: torch.zeros_like(each) for name, each in self._trainable.items()},
                stacked(),
                stacked() if work.momentum else {},
                stacked() if has_offsets else {},
                {
                    name: torch.zeros((), device=self._device)
                    for name in ("lr", "mu", "momentum", "clip_grad_norm")
                },
            )
        return self._memories[key]

    def _load(self, params: Params, memory: _Memory, work: Work, offsets: Sequence[Params]) -> None:
        """Sets what the stack starts from, and the module's tensors that are not trained."""
        for name, tensor in float_tensors(self._module).items():
            target = memory.start.get(name, tensor.detach())
            host = np.empty(tuple(target.shape), np.float32)
            copy_into(host, params, name)
            target.copy_(torch.from_numpy(host))
        for name, weight in memory.weights.items():
            weight.copy_(memory.start[name])
        for each in memory.velocity.values():
            each.zero_()
        for name, offset in memory.offset.items():
            offset.copy_(torch.from_numpy(np.stack([each[name] for each in offsets])))
        for name, scalar in memory.scalars.items():
            scalar.fill_(getattr(work, name))

    def _take_steps(
        self, layout: Layout, memory: _Memory, work: Work, data: Workspace
    ) -> npt.NDArray[np.float64]:
        """Trains the weights in place; the mean loss of each slot."""
        x, y, rows = self._rows(data, layout)
        sizes = torch.from_numpy(layout.sizes).to(self._device)
        real = torch.arange(layout.rows.shape[2], device=self._device) < sizes[..., None]
        losses = torch.zeros(layout.sizes.shape, device=self._device)
        for number in range(len(layout.rows)):
            slots = slice(0, _round_up(layout.active(number), layout.rows.shape[1]))
            step = self._step(memory, slots.stop, layout.rows.shape[2], x, y)
            chosen = rows[number, slots]
            torch.index_select(x, 0, chosen.flatten(), out=step.rows.flatten(0, 1))
            labels = y[chosen]
            labels[~real[number, slots]] = filling(y)
            step.labels.copy_(labels)
            step.active.copy_(sizes[number, slots] > 0)
            self._run(memory, step, work)
            losses[number, slots] = step.losses
        counted = np.where(layout.sizes, losses.double().cpu().numpy(), 0) * layout.sizes
        return np.asarray(counted.sum(0) / layout.sizes.sum(0), np.float64)

    def _rows(self, data: Workspace, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows and labels on the device, and the layout's indices of them."""
        if self._data is not None and self._data[0] is data:
            return self._data[1], self._data[2], torch.from_numpy(layout.rows).to(self._device)
        self._data = None
        free = torch.cuda.mem_get_info()[0] if self._device.type == "cuda" else 2**62
        if data.x.nbytes <= free // RESIDENT_SHARE:
            self._data = (data, self._send(data.x), self._send(data.y))
            return self._rows(data, layout)
        needed, indices = np.unique(layout.rows, return_inverse=True)
        at = torch.from_numpy(indices.reshape(layout.rows.shape)).to(self._device)
        return self._send(data.x[needed]), self._send(data.y[needed]), at

    def _send(self, array: npt.NDArray[Any]) -> torch.Tensor:
        # A copy: `from_numpy` warns about read-only arrays, and mapped ones are read-only.
        return torch.tensor(array, device=self._device)

    def _step(self, memory: _Memory, models: int, width: int, x: torch.Tensor, y: torch.Tensor) -> _Step:
        if models not in memory.steps:
            memory.steps[models] = _Step(
                x.new_zeros((models, width, *x.shape[1:])),
                y.new_zeros((models, width, *y.shape[1:])),
                torch.zeros(models, dtype=torch.bool, device=self._device),
                torch.zeros(models, device=self._device),
            )
        return memory.steps[models]

    def _run(self, memory: _Memory, step: _Step, work: Work) -> None:
        """Takes the step; the first time its kernels are also recorded, if there is a GPU."""
        if step.graph is not None:
            step.graph.replay()
            return
        if self._device.type != "cuda":
            self._take_step(memory, step, work)
            return
        # The first run of a kernel may allocate, which a recording must not.
        aside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._take_step(memory, step, work)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, runs nothing
            self._take_step(memory, step, work)
        step.graph = graph

    def _take_step(self, memory: _Memory, step: _Step, work: Work) -> None:
        def loss_of(weights: Weights, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self._spec.loss(functional_call(self._module, weights, (x,)), y)

        models, scalars = len(step.active), memory.scalars
        weights = {name: each[:models] for name, each in memory.weights.items()}
        # Of the ways of attention only the plain one can be vectorised.
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            gradients, losses = vmap(grad_and_value(loss_of))(weights, step.rows, step.labels)
            step.losses.copy_(losses)
            for name, gradient in gradients.items():
                if memory.offset:
                    gradient = gradient + memory.offset[name][:models]
                if work.mu:
                    gradient = gradient + scalars["mu"] * (weights[name] - memory.start[name])
                gradients[name] = gradient
            if work.clip_grad_norm:
                squares = [each.flatten(1).double().square().sum(1) for each in gradients.values()]
                norms = torch.stack(squares).sum(0).sqrt()
                factors = (scalars["clip_grad_norm"] / (norms + CLIP_EPSILON)).clamp(max=1).float()
                gradients = {name: _by_model(factors, each) * each for name, each in gradients.items()}
            for name, gradient in gradients.items():
                if work.momentum:
                    velocity = memory.velocity[name][:models]
                    gradient = velocity.mul_(scalars["momentum"]).add_(gradient)
                moved = weights[name] - scalars["lr"] * gradient
                weights[name].copy_(torch.where(_by_model(step.active, moved), moved, weights[name]))


class DeviceEvaluation(TorchRuntime):
    """As `TorchRuntime`, but logits are computed on the device."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        super().__init__(spec.build(0), spec.loss)
        self._device = device
        self._copy = spec.build(0).to(device)
        self._copy.eval()

    def logits(self, params: Tensors, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        for name, tensor in float_tensors(self._copy).items():
            host = np.empty(tuple(tensor.shape), np.float32)
            copy_into(host, params, name)
            tensor.detach().copy_(torch.from_numpy(host))
        with torch.inference_mode():
            answer: npt.NDArray[np.float32] = self._copy(torch.tensor(x, device=self._device)).cpu().numpy()
        return answer


def _by_model(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A value for each model, [models], in the dimensions of `like` [models, …]."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _round_up(active: int, models: int) -> int:
    """The number of slots that take a step with `active` ones: a power of two or all, so that few graphs are recorded."""
    return min(models, 1 << (active - 1).bit_length())


def _finish(memory: _Memory, layout: Layout, losses: npt.NDArray[np.float64]) -> Stack:
    """The results in the order of the clients."""
    slots = np.empty_like(layout.order)
    slots[layout.order] = np.arange(len(slots))
    deltas = {}
    for name, weight in memory.weights.items():
        trained = weight - memory.start[name]
        deltas[name] = trained[torch.from_numpy(slots).to(trained.device)].cpu().numpy()
    return Stack(deltas, layout.steps[slots], losses[slots])
