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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

Gradients = torch.futures.Future[torch.Tensor]

MIN_COMPRESSION = 2
"""How many times fewer values P and Q must have than the matrix."""


@dataclass(frozen=True)
class _Coded:
    """A bucket whose first exchange has begun. `lefts`: by the param's index, of its `matrices`; `sent`: those and the `others`."""

    buffer: torch.Tensor
    matrices: dict[int, torch.Tensor]
    others: list[torch.Tensor]
    lefts: dict[int, torch.Tensor]
    sent: torch.Tensor
    work: dist.Work
    averaged: Gradients


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
        self._begun: list[_Coded] = []

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
        """Approximate mean of a bucket, the same on all processes; a communication hook.

        The first exchange of a bucket goes on during the backward pass. The second one of all buckets follows when the last one is
        full: issued as the first ones end, it would come in another order on every process.
        """
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
        lefts = {place: matrix @ self._right(place, matrix) for place, matrix in matrices.items()}
        # uncompressed tensors are sent with the first of the two exchanges
        sent = _flat([*lefts.values(), *others], buffer)
        work = dist.all_reduce(sent, group=self.group, async_op=True)
        devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
        averaged: Gradients = torch.futures.Future(devices=devices)
        self._begun.append(_Coded(buffer, matrices, others, lefts, sent, work, averaged))
        if last:
            self._finish()
        return averaged

    def _finish(self) -> None:
        """Exchanges the right factors of all buckets that have begun, in their order."""
        begun, self._begun = self._begun, []
        sent = [self._exchange_rights(coded) for coded in begun]
        for coded, (rights, flat, work) in zip(begun, sent, strict=True):
            if work is not None:
                work.wait()
            means = _split(flat.div_(self.group.size()), list(rights.values()))
            for (place, matrix), mean in zip(coded.matrices.items(), means, strict=True):
                product = coded.lefts[place] @ mean.T
                self._rights[place] = mean.clone()
                self._errors[place] = (matrix - product).view(-1)
                matrix.copy_(product)
            coded.averaged.set_result(coded.buffer)

    def _exchange_rights(
        self, coded: _Coded
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor, dist.Work | None]:
        """Begins to sum the right factors of a bucket, which follow from the mean of its left ones."""
        coded.work.wait()
        summed = _split(coded.sent.div_(self.group.size()), [*coded.lefts.values(), *coded.others])
        for other, mean in zip(coded.others, summed[len(coded.lefts) :], strict=True):
            other.copy_(mean)
        rights = {}
        for (place, matrix), left in zip(coded.matrices.items(), summed, strict=False):
            coded.lefts[place] = torch.linalg.qr(left).Q
            rights[place] = matrix.T @ coded.lefts[place]
        flat = _flat(list(rights.values()), coded.buffer)
        work = dist.all_reduce(flat, group=self.group, async_op=True) if len(flat) else None
        return rights, flat, work

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
