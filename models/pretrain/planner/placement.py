"""How a plan maps pieces to processes and hosts: shared by `predict` and `memory`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from models.pretrain.plan import ParallelPlan
from models.pretrain.planner.collective_cost import Link
from models.pretrain.planner.profile import Piece, Profile

VALUE_BYTES = 4


@dataclass(frozen=True)
class Placement:
    """A plan for a profile and a global batch of `batch_size` rows.

    Ranks are numbered with tp fastest, then cp, dp, pp, and fill hosts of `per_host` in order.
    """

    plan: ParallelPlan
    profile: Profile
    batch_size: int

    @property
    def rows(self) -> float:
        """Rows of one micro-batch of one process; fractions where cp splits rows."""
        return self.batch_size / self.plan.dp / self.plan.num_microbatches / self.plan.cp

    @property
    def data(self) -> int:
        """Number of processes whose gradients add up."""
        return self.plan.dp * self.plan.cp

    @property
    def param_shards(self) -> int:
        """Number of processes that params are sharded over, with zero of 2 or 3."""
        return self.plan.shard * self.plan.cp

    @property
    def per_host(self) -> int:
        return min(self.profile.machine.per_host, self.plan.processes)

    def stages(self) -> list[list[Piece]]:
        """Pieces of every stage, without the loss, which belongs to the last one."""
        profile = self.profile
        if self.plan.pp == 1:
            return [[profile.first, *profile.layers, profile.last]]
        stages = [
            [profile.layers[index] for index in layers]
            for layers in self.plan.layers_per_stage(len(profile.layers))
        ]
        stages[0] = [profile.first, *stages[0]]
        stages[-1] = [*stages[-1], profile.last]
        return stages

    def values(self, pieces: Sequence[Piece]) -> float:
        """Parameters of `pieces` on one process before sharding."""
        return sum(piece.local_values(self.plan.tp, self.plan.ep) for piece in pieces)

    def loss_tp(self) -> int:
        """Number of tp ranks that the loss is split over."""
        return self.plan.tp if self.plan.loss_parallel else 1

    def is_layer(self, piece: Piece) -> bool:
        return piece.name not in (self.profile.first.name, self.profile.last.name)

    def policy(self, piece: Piece) -> str:
        policy = self.plan.activation_checkpoint
        return policy if policy in piece.backward else "none"

    def link(self, axis: str) -> Link:
        """The slowest link along an axis: tp, cp, ep, replicate, fsdp, data.

        Rings that leave a host at the same time share its uplink.
        """
        plan, machine = self.plan, self.profile.machine
        inner = plan.tp * plan.cp
        size, stride = {
            "tp": (plan.tp, 1),
            "cp": (plan.cp, plan.tp),
            "ep": (plan.ep, inner),
            "replicate": (plan.replicate, inner * plan.shard),
            "fsdp": (self.param_shards, plan.tp),
            "data": (self.data, plan.tp),
        }[axis]
        if size * stride <= self.per_host and self.per_host % (size * stride) == 0:
            return self.inside
        together = max(1, self.per_host // stride)  # ranks of one group on a host
        rings = max(1, self.per_host // min(together, size))
        return replace(machine.between, beta=machine.between.beta * rings)

    def send_link(self, stage: int) -> Link:
        """The link from a stage to the next."""
        plan, per_host = self.plan, self.profile.machine.per_host
        copies = plan.processes // plan.pp
        hosts = {
            place * copies // per_host
            for place in range(plan.pp)
            if {stage, stage + 1} & {*plan.stage_numbers(place)}
        }
        return self.inside if len(hosts) == 1 else self.profile.machine.between

    @property
    def inside(self) -> Link:
        """The link inside a host, slower where processors move the bytes and are scarce."""
        machine = self.profile.machine
        if machine.device != "cpu":
            return machine.inside
        slow = machine.slower(self.per_host) / machine.slower(min(2, self.per_host))
        return Link(machine.inside.alpha * slow, machine.inside.beta * slow, machine.inside.gamma * slow)

    def slower(self, place: int, active: Sequence[bool]) -> float:
        """Slowdown of the rank at `place` along pp while those at `active` places compute."""
        per_host, copies = self.profile.machine.per_host, self.plan.processes // self.plan.pp
        host = place * copies // per_host
        sharing = 0
        for other, computes in enumerate(active):
            if computes:
                first, end = other * copies, (other + 1) * copies
                sharing += max(0, min(end, (host + 1) * per_host) - max(first, host * per_host))
        return self.profile.machine.slower(max(1, sharing))
