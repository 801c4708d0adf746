"""What mechanisms do not go with whose noise clients add themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.experiments import device_classes

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment


def find_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each problem of their keys."""
    table = experiment.privacy
    of_mechanism = f"privacy.mechanism = {table.mechanism!r}"
    if table.sampling != "none":
        yield (
            f"privacy.sampling = {table.sampling!r} does not go with {of_mechanism}: the coordinator, from which its noise protects, knows who takes "
            "part, so sampling hides nobody from it; leave it out, or take privacy.minimum_separation"
        )
    if table.clipping == "adaptive":
        what = "gradients" if table.mechanism == "example" else "updates"
        yield (
            f'privacy.clipping = "adaptive" does not go with {of_mechanism}: clients would have to tell how long their {what} are; take "fixed"'
        )
    if table.mechanism == "example":
        yield from _row_problems(experiment)
    if table.mechanism == "distributed" and table.accountant == "pld":
        yield (
            f'privacy.accountant = "pld" does not go with {of_mechanism}: the privacy loss distribution of noise on integers is not known in '
            'many dimensions; take "rdp"'
        )
    if table.mechanism == "distributed" and not table.secure_aggregation:
        yield (
            f"{of_mechanism} adds shares of the noise, which are too small for a single update, inside secure aggregation; set "
            'privacy.secure_aggregation = true, or take privacy.mechanism = "local"'
        )


def _row_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each key by which clients would not train by DP-SGD."""
    of_mechanism = 'privacy.mechanism = "example"'
    simulation, runtimes = experiment.simulation, experiment.federation.runtimes
    if others := sorted(set(runtimes) - {"torch"}):
        yield (
            f"federation.runtimes asks for {', '.join(others)}, but {of_mechanism} needs the gradients of single rows, which only PyTorch "
            "clients compute; take { torch = 1 }"
        )
    if simulation.engine not in ("pool", "auto"):
        yield (
            f'simulation.engine = "{simulation.engine}" does not go with {of_mechanism}: it takes steps without gradients of single rows; take '
            '"pool" or "auto"'
        )
    if device_classes.are_used(experiment):
        yield f"device_classes do not go with {of_mechanism}: clients of a class would train another model without noise; leave them out"
