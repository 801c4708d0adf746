"""The table `[uplink]`: the code by which clients write their updates, and what it does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.experiments.sections import Uplink
from strategies.client_rules import (
    ControlVariates,
    DynamicRegularizer,
    FullBatch,
    MeasuredLoss,
    PlainSGD,
    Proximal,
)
from strategies.codes import known
from strategies.options import OptionError
from strategies.robust import RobustAggregator
from strategies.strategy import ClipNorm

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment
    from strategies.codes.code import Code
    from strategies.strategy import Strategy

FAITHFUL = ("qsgd with bits = 8", "eden with bits = 4")
"""Codes whose error is small beside each single update, about a hundredth of its squared norm or less."""

_HEADER_FAULTS = ("stale_base", "duplicate", "no_examples")
"""Faults that are not about tensors."""


def complete(uplink: Uplink) -> Uplink:
    """The table with the options that its code has by default. Invalid ones stay as they are; the checks report them."""
    defaults = {key: option.default for key, option in known.OPTIONS.get(uplink.code or "", {}).items()}
    return uplink.model_copy(update=defaults | uplink.options)


def make_code(uplink: Uplink) -> Code | None:
    """The code of a checked table; None: updates are sent as they are."""
    return None if uplink.code is None else known.get(uplink.code, **uplink.options)


def find_problems(experiment: Experiment) -> Iterator[str]:
    """One sentence for each problem of the table, and of what it does not go with, beside the strategy."""
    uplink = experiment.uplink
    if uplink.code is None:
        for key, value in uplink.options.items():
            yield f"uplink.{key} = {value!r} is an option of a code; set uplink.code too, or leave it out"
        return
    try:
        known.get(uplink.code, **uplink.options)
    except OptionError as error:
        yield f"uplink.{error.option}: {error}"
    yield from _simulation_problems(experiment)
    if known.get(uplink.code).error_feedback:
        yield from _feedback_problems(experiment)


def strategy_problems(uplink: Uplink, strategy: Strategy) -> Iterator[str]:
    """One sentence if the code does not go with the strategy."""
    try:
        code = make_code(uplink)
    except OptionError:  # reported by `find_problems`
        code = known.get(uplink.code or "")
    if code is None:
        return
    why = _why_not(code, strategy)
    if why is not None:
        yield f"uplink.code = {code.name!r} does not go with strategy.name = {strategy.name!r}: {why}"


def _why_not(code: Code, strategy: Strategy) -> str | None:
    if isinstance(strategy.client_rule, MeasuredLoss):
        return "its clients send a loss beside the update, and a code writes only the update"
    if isinstance(strategy.client_rule, ControlVariates | DynamicRegularizer):
        return (
            "its clients correct their steps by what they and the server remember of past updates, and with the errors of a code "
            "these would no longer agree; take a strategy whose clients remember nothing, such as fedavg or fedprox"
        )
    if not isinstance(strategy.client_rule, PlainSGD | Proximal | FullBatch):
        return (
            "its clients keep a part of what they learn, which no code knows of yet; take fedavg or fedprox"
        )
    if isinstance(strategy.aggregator, RobustAggregator):
        if f"{code.name} with bits = {code.parameter}" not in FAITHFUL:
            return f"it compares single updates, and this code keeps too little of each; take {' or '.join(FAITHFUL)}"
        return None
    if code.error_feedback and any(isinstance(each, ClipNorm) for each in strategy.transforms):
        return "the client counts as sent what strategy.clip_norm cuts off; leave strategy.clip_norm out, or take qsgd, drive or eden"
    return None


def _simulation_problems(experiment: Experiment) -> Iterator[str]:
    simulation, code = experiment.simulation, experiment.uplink.code
    for fault in simulation.faults:
        if fault not in _HEADER_FAULTS:
            yield (
                f"simulation.faults: {fault} is a fault of tensors, and with uplink.code = {code!r} none are sent; expected: "
                f"{', '.join(_HEADER_FAULTS)}"
            )
    attack = simulation.attack
    if attack is not None and (attack.name not in ("label_flip", "backdoor") or attack.scale is not None):
        key = "name" if attack.name not in ("label_flip", "backdoor") else "scale"
        yield (
            f"simulation.attack.{key} = {getattr(attack, key)!r} changes an update after the code has written it, so with uplink.code = "
            f"{code!r} it would send what the code cannot; take label_flip, or a backdoor without a scale"
        )


def _feedback_problems(experiment: Experiment) -> Iterator[str]:
    federation, code = experiment.federation, experiment.uplink.code
    if federation.mode == "async":
        yield (
            f"uplink.code = {code!r} keeps on the client what it did not send, and in asynchronous runs (federation.mode = 'async') "
            "clients keep nothing; take qsgd, drive or eden"
        )
    clients, cohort = federation.clients, federation.clients_per_round
    once = clients is not None and cohort is not None and federation.rounds * cohort <= clients
    if once or federation.rounds == 1:
        yield (
            f"uplink.code = {code!r} keeps what it did not send for the client's next update, and with federation.rounds = "
            f"{federation.rounds} a client takes part about once; take qsgd, drive or eden, or more rounds"
        )
