"""Which of the hosts that answer train together, and how many processes each runs. Pure functions.

The degrees of a plan inside a share of the batch (pp, cp, tp) stay as they are. With fewer hosts, dp is the largest for which
there are slots and which the plan's rules allow; the global batch stays the same, so the losses do too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.pretrain import plan as plans
from models.pretrain import plan_rules
from models.pretrain.hosts.hostfile import Host
from models.pretrain.plan import ParallelPlan, PlanError, Sizes
from models.pretrain.training import TrainingOptions


@dataclass(frozen=True)
class Allocation:
    """Processes per host name, without hosts that run none, in the order of the hosts; and the plan they follow."""

    ranks: Mapping[str, int]
    plan: ParallelPlan

    @property
    def processes(self) -> int:
        return self.plan.processes


@dataclass(frozen=True)
class Limits:
    """What a plan must follow.

    Attributes:
        table: the plan's keys without dp.
        processes: when all hosts are there.
    """

    table: Mapping[str, Any]
    processes: int
    sizes: Sizes
    options: TrainingOptions

    def allocate(self, hosts: Sequence[Host]) -> Allocation | None:
        """The most processes on `hosts` that the plan allows; None if it allows none."""
        slots = min(self.processes, sum(host.slots for host in hosts))
        group = plans.from_table(self.table).processes
        for dp in range(slots // group, 0, -1):
            plan = replace(plans.from_table(self.table), dp=dp)
            try:
                plan_rules.check(plan, self.sizes, self.options)
            except PlanError:
                continue
            return Allocation(fill(hosts, plan.processes), plan)
        return None


def fill(hosts: Sequence[Host], processes: int) -> dict[str, int]:
    """Places processes on the hosts in order, as many on each as it has slots."""
    ranks: dict[str, int] = {}
    for host in hosts:
        if here := min(host.slots, processes - sum(ranks.values())):
            ranks[host.name] = here
    return ranks
