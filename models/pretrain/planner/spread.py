"""How a plan lies over pieces, processes and hosts: what `predict` and `memory` both need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.pretrain.collectives.cost import Link
from models.pretrain.parallelize import stage_numbers
from models.pretrain.plan import ParallelPlan
from models.pretrain.planner.pipeline import place_of
from models.pretrain.planner.profile import Piece, Profile


@dataclass(frozen=True)
class Spread:
    """A plan for a profile and a global batch of `batch_size` rows.

    Ranks are numbered with tp fastest, then cp, dp, pp, and fill one host of `per_host` after the other.
    """

    plan: ParallelPlan
    profile: Profile
    batch_size: int

    @property
    def rows(self) -> float:
        """Of one micro-batch of one process, parts of rows where cp splits them."""
        return self.batch_size / self.plan.dp / self.plan.pieces / self.plan.cp

    @property
    def data(self) -> int:
        """Processes whose gradients add up."""
        return self.plan.dp * self.plan.cp

    @property
    def keepers(self) -> int:
        """Processes that params are spread over, with zero of 2 or 3."""
        return self.plan.shard * self.plan.cp

    @property
    def per_host(self) -> int:
        return min(self.profile.machine.per_host, self.plan.processes)

    def stages(self) -> list[list[Piece]]:
        """Pieces of every stage but the loss, which the last one has besides."""
        profile = self.profile
        if self.plan.pp == 1:
            return [[profile.first, *profile.layers, profile.last]]
        stages = [
            [profile.layers[index] for index in layers] for layers in self.plan.layers_of(len(profile.layers))
        ]
        stages[0] = [profile.first, *stages[0]]
        stages[-1] = [*stages[-1], profile.last]
        return stages

    def stages_of(self, place: int) -> list[int]:
        return list(stage_numbers(self.plan, place))

    def values(self, pieces: Sequence[Piece]) -> float:
        """Parameters of `pieces` on one process before they are shared out."""
        return sum(piece.local_values(self.plan.tp, self.plan.ep) for piece in pieces)

    def loss_tp(self) -> int:
        """Over how many tp ranks the loss is split."""
        return self.plan.tp if self.plan.loss_parallel else 1

    def is_layer(self, piece: Piece) -> bool:
        return piece.name not in (self.profile.first.name, self.profile.last.name)

    def policy(self, piece: Piece) -> str:
        return self.plan.recompute if self.plan.recompute in piece.backward else "none"

    def link(self, axis: str) -> Link:
        """The slowest link along an axis: tp, cp, shard, replicate, kept, data, ep.

        Rings that leave a host at the same time share what leads out of it.
        """
        plan, machine = self.plan, self.profile.machine
        stride = {"tp": 1, "cp": plan.tp}.get(axis, plan.tp * plan.cp)
        size = {
            "tp": plan.tp,
            "cp": plan.cp,
            "ep": plan.ep,
            "shard": plan.shard,
            "replicate": plan.replicate,
            "kept": plan.shard * plan.cp,
            "data": plan.dp * plan.cp,
        }[axis]
        if axis in ("kept", "data"):
            stride = plan.tp
        if axis == "replicate":
            stride = plan.tp * plan.cp * plan.shard
        if size * stride <= self.per_host and self.per_host % (size * stride) == 0:
            return self.inside
        together = max(1, self.per_host // stride)  # ranks of one group on a host
        rings = max(1, self.per_host // min(together, size))
        return replace(machine.between, beta=machine.between.beta * rings)

    def send_link(self, stage: int) -> Link:
        """From a stage to the next."""
        copies = self.plan.processes // self.plan.pp
        hosts = {place_of(self.plan, s) * copies // self.profile.machine.per_host for s in (stage, stage + 1)}
        return self.inside if len(hosts) == 1 else self.profile.machine.between

    @property
    def inside(self) -> Link:
        """The link inside a host, slower where processors move the bytes and are short."""
        machine = self.profile.machine
        if machine.device != "cpu":
            return machine.inside
        slow = machine.slower(self.per_host) / machine.slower(min(2, self.per_host))
        return Link(machine.inside.alpha * slow, machine.inside.beta * slow, machine.inside.gamma * slow)

    def slower(self, place: int, active: Sequence[bool]) -> float:
        """How much longer the process at `place` along pp takes while those of `active` places compute."""
        per_host, copies = self.profile.machine.per_host, self.plan.processes // self.plan.pp
        host = place * copies // per_host
        sharing = 0
        for other, computes in enumerate(active):
            if computes:
                first, end = other * copies, (other + 1) * copies
                sharing += max(0, min(end, (host + 1) * per_host) - max(first, host * per_host))
        return self.profile.machine.slower(max(1, sharing))
