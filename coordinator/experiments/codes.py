"""The tables `[uplink]` and `[downlink]`: the codes by which updates and models are written, and what these do not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from coordinator.experiments.sections import CodeOptions
from strategies.algorithms.server_data.feddf import EnsembleDistillation
from strategies.algorithms.server_data.fltrust import TrustedMean
from strategies.client_rules import (
    ControlVariates,
    DynamicRegularizer,
    FullBatch,
    MeasuredLoss,
    PlainSGD,
    Proximal,
)
from strategies.codes import known
from strategies.option_check import OptionError
from strategies.robust import RobustAggregator
from strategies.strategy import ClipNorm

if TYPE_CHECKING:
    from coordinator.experiments.schema import Experiment, Federation, FleetKind
    from strategies.codes.code import Code
    from strategies.strategy import Strategy

Table = TypeVar("Table", bound=CodeOptions)

FAITHFUL = ("qsgd with bits = 8", "eden with bits = 4")
"""Codes whose error is small beside each single update, about a hundredth of its squared norm or less."""

LEAST_SHARE = 0.2
"""Of drive on the downlink: its error is then at most 0.7 of the squared norm of what it writes; of 0.13 it would be all of it."""

_HEADER_FAULTS = ("stale_base", "duplicate", "no_examples")
"""Faults that are not about tensors."""


def complete(table: Table) -> Table:
    """The table with the options that its code has by default. Invalid ones stay as they are; the checks report them."""
    defaults = {key: option.default for key, option in known.OPTIONS.get(table.code or "", {}).items()}
    return table.model_copy(update=defaults | table.options)


def make_code(table: CodeOptions) -> Code | None:
    """The code of a checked table; None: things are sent as they are."""
    return None if table.code is None else known.get(table.code, **table.options)


def find_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    """One sentence for each problem of the tables, and of what they do not go with, beside the strategy."""
    for name, table in (("uplink", experiment.uplink), ("downlink", experiment.downlink)):
        yield from _table_problems(name, table)
    if experiment.uplink.code is not None:
        yield from _simulation_problems(experiment)
        if known.get(experiment.uplink.code).error_feedback:
            yield from _feedback_problems(experiment)
    if experiment.downlink.code is not None:
        yield from _downlink_problems(experiment, fleet)


def strategy_problems(experiment: Experiment, strategy: Strategy) -> Iterator[str]:
    """One sentence for each code that does not go with the strategy."""
    for name, table, find in (
        ("uplink", experiment.uplink, _why_no_uplink),
        ("downlink", experiment.downlink, _why_no_downlink),
    ):
        try:
            code = make_code(table)
        except OptionError:  # reported by `find_problems`
            code = known.get(table.code or "")
        why = None if code is None else find(code, strategy)
        if why is not None:
            yield f"{name}.code = {table.code!r} does not go with strategy.name = {strategy.name!r}: {why}"


def _table_problems(name: str, table: CodeOptions) -> Iterator[str]:
    if table.code is None:
        for key, value in table.options.items():
            yield f"{name}.{key} = {value!r} is an option of a code; set {name}.code too, or leave it out"
        return
    try:
        known.get(table.code, **table.options)
    except OptionError as error:
        yield f"{name}.{error.option}: {error}"


def _why_no_uplink(code: Code, strategy: Strategy) -> str | None:
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
    if isinstance(strategy.aggregator, RobustAggregator | TrustedMean):
        if f"{code.name} with bits = {code.parameter}" not in FAITHFUL:
            return f"it compares single updates, and this code keeps too little of each; take {' or '.join(FAITHFUL)}"
        return None
    if code.error_feedback and any(isinstance(each, ClipNorm) for each in strategy.transforms):
        return "the client counts as sent what strategy.clip_norm cuts off; leave strategy.clip_norm out, or take qsgd, drive or eden"
    return None


def _why_no_downlink(code: Code, strategy: Strategy) -> str | None:
    if isinstance(strategy.client_rule, ControlVariates | DynamicRegularizer):
        return (
            "its clients correct their steps by what they and the server remember of past models, and with the errors of a code these "
            "would no longer agree; take a strategy whose clients remember nothing, such as fedavg or fedprox"
        )
    if isinstance(strategy.client_rule, MeasuredLoss):
        return "its clients measure the loss of the server's model, and with a code they get another one; leave it out"
    if isinstance(strategy.aggregator, EnsembleDistillation):
        return "the server distils the model that clients train from, and with a code that is another one than its own; leave it out"
    if isinstance(strategy.aggregator, TrustedMean):
        return "the server compares clients' updates with one of its own, and with a code theirs start from another model; leave it out"
    if not isinstance(strategy.client_rule, PlainSGD | Proximal | FullBatch):
        return "its clients keep a part of the model, which no code knows of yet; take fedavg or fedprox"
    return None


def _downlink_problems(experiment: Experiment, fleet: FleetKind) -> Iterator[str]:
    federation, downlink = experiment.federation, experiment.downlink
    key = f"downlink.code = {downlink.code!r}"
    if fleet == "devices":
        yield (
            f"{key} is for simulations: a device fetches the whole model by its hash, from which it can go on after an interruption; leave "
            "it out"
        )
    if federation.mode == "async":
        yield (
            f"{key} sends what has changed since the last round, and in asynchronous runs (federation.mode = 'async') clients start "
            "from many versions; leave it out"
        )
    if (downlink.code, downlink.bits) == ("qsgd", 2):
        yield (
            f"{key} with downlink.bits = 2 has an error that may be larger than what it writes, so that clients would drift away from the "
            "model; take downlink.bits = 4, or eden"
        )
    if downlink.code == "drive" and (downlink.share or 1) < LEAST_SHARE:
        yield (
            f"{key} with downlink.share = {downlink.share:g} has an error that is larger than what it writes, so that clients would drift away "
            f"from the model; take a share of {LEAST_SHARE} or more, or topk"
        )
    if (rounds := federation.rounds) == 1 or _is_one_shot(federation):
        yield (
            f"{key} sends what a client lacks of the model, and with federation.rounds = {rounds} a client takes part about once and gets "
            "all of it; leave it out, or take more rounds"
        )


def _is_one_shot(federation: Federation) -> bool:
    """Whether a client takes part about once."""
    clients, cohort = federation.clients, federation.clients_per_round
    return clients is not None and cohort is not None and federation.rounds * cohort <= clients


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
    if federation.rounds == 1 or _is_one_shot(federation):
        yield (
            f"uplink.code = {code!r} keeps what it did not send for the client's next update, and with federation.rounds = "
            f"{federation.rounds} a client takes part about once; take qsgd, drive or eden, or more rounds"
        )
