"""PowerSGD (Vogels 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization").

    warm-up      gradients are averaged uncompressed
    afterwards   a matrix M [n, m] is sent as P = M Q [n, r] and Q = Mᵀ P [m, r], with P orthonormalized in between: one
                 step of power iteration per training step, starting from the previous step's Q (Algorithm 1)

The part of a process's gradient that the product loses is added to its next gradient. Tensors that would hardly
shrink, such as vectors, are sent uncompressed.

Torch's own hook keeps errors and Q by bucket, and DistributedDataParallel rearranges buckets in its second step, so a
resumed training could not restore them. Here both belong to a param, whatever bucket it is in.
"""

# no postponed annotations: DistributedDataParallel reads those of a hook and expects types

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Gradients = torch.futures.Future[torch.Tensor]

MIN_COMPRESSION = 2
"""How many times fewer values P and Q must have than the matrix."""


class PowerSGD:
    """The compressor of one process for the gradients of `parameters`, with its state between steps.

    Args:
        rank: rank of the products, at most.
        warmup: steps without compression.

    Attributes:
        kind: as in `models.pretrain.recovery.state.RankState`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, rank: int, warmup: int
    ) -> None:
        self.group, self.rank, self.warmup = group, rank, warmup
        self.kind = f"powersgd of rank {rank}, {group.size()} processes, {len(parameters)} params"
        self.step = 0
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._errors: dict[int, torch.Tensor] = {}
        self._rights: dict[int, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Errors, and the Q of the next step, by the param's index."""
        errors = {f"error.{place}": error for place, error in self._errors.items()}
        return errors | {f"right.{place}": right for place, right in self._rights.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Continues after `step` with what `tensors` returned; without any, with no errors."""
        self.step = step
        self._errors, self._rights = (
            {int(name.partition(".")[2]): tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in ("error.", "right.")
        )

    def synchronized(self) -> dict[int, torch.Tensor]:
        """Nothing: params are the same everywhere."""
        return {}

    def average(self, bucket: GradBucket) -> Gradients:
        """Approximate mean of a bucket, the same on all processes; a communication hook."""
        last, coding = bucket.is_last(), self.step >= self.warmup
        self.step += last
        if not coding:
            return default_hooks.allreduce_hook(self.group, bucket)
        buffer, gradients = bucket.buffer(), bucket.gradients()
        places = [self._places[id(parameter)] for parameter in bucket.parameters()]
        for place, gradient in zip(places, gradients, strict=True):
            if place in self._errors:
                gradient.add_(self._errors[place].view_as(gradient))
        matrices = {
            place: gradient.view(len(gradient), -1)
            for place, gradient in zip(places, gradients, strict=True)
            if self._pays(gradient)
        }
        others = [
            gradient for place, gradient in zip(places, gradients, strict=True) if place not in matrices
        ]
        targets = {place: matrix.clone() for place, matrix in matrices.items()}
        rights = {place: self._right(place, matrix) for place, matrix in matrices.items()}
        lefts = {place: matrix @ rights[place] for place, matrix in matrices.items()}
        # uncompressed tensors are sent with the first of the two exchanges
        first = _flat([*lefts.values(), *others], buffer)

        def right(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            summed = _split(done.value()[0].div_(self.group.size()), [*lefts.values(), *others])
            for other, mean in zip(others, summed[len(lefts) :], strict=True):
                other.copy_(mean)
            for place, left in zip(matrices, summed, strict=False):
                lefts[place] = torch.linalg.qr(left).Q
                rights[place] = matrices[place].T @ lefts[place]
            second = _flat(list(rights.values()), buffer)
            if len(second):
                dist.all_reduce(second, group=self.group, async_op=True).get_future().wait()
            return second.div_(self.group.size())

        def product(done: Gradients) -> torch.Tensor:
            means = _split(done.value(), list(rights.values()))
            for place, mean in zip(matrices, means, strict=True):
                self._rights[place] = mean.clone()
                matrices[place].copy_(lefts[place] @ mean.T)
                self._errors[place] = (targets[place] - matrices[place]).view(-1)
            return buffer

        sent = dist.all_reduce(first, group=self.group, async_op=True).get_future()
        averaged: Gradients = sent.then(right).then(product)
        return averaged

    def _pays(self, gradient: torch.Tensor) -> bool:
        rows, columns = len(gradient), gradient.numel() // len(gradient)
        rank = min(rows, columns, self.rank)
        return (rows + columns) * rank * MIN_COMPRESSION < rows * columns

    def _right(self, place: int, matrix: torch.Tensor) -> torch.Tensor:
        """Orthonormal columns to multiply a matrix by: those of the previous step, or random ones, the same on all."""
        right = self._rights.get(place)
        if right is None:
            random = torch.Generator().manual_seed(place)
            columns = min(*matrix.shape, self.rank)
            right = torch.randn(matrix.shape[1], columns, generator=random).to(matrix)
        orthonormal: torch.Tensor = torch.linalg.qr(right).Q
        return orthonormal


def _flat(tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_empty(0)


def _split(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]
