"""Strategies by the names the field uses: `get("fedadam", server_lr=0.03)` checks names and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

from strategies import client_rules
from strategies import options as algorithm_options
from strategies.algorithms.diloco import DiLoCo
from strategies.algorithms.ditto import Ditto
from strategies.algorithms.fedadagrad import FedAdagrad
from strategies.algorithms.fedadam import FedAdam
from strategies.algorithms.fedasync import FedAsync
from strategies.algorithms.fedavg import FedAvg
from strategies.algorithms.fedavgm import FedAvgM
from strategies.algorithms.fedbn import FedBN
from strategies.algorithms.fedbuff import FedBuff
from strategies.algorithms.feddyn import FedDyn
from strategies.algorithms.fednova import FedNova
from strategies.algorithms.fedper import FedPer
from strategies.algorithms.fedprox import FedProx
from strategies.algorithms.fedrep import FedRep
from strategies.algorithms.fedsgd import FedSGD
from strategies.algorithms.fedyogi import FedYogi
from strategies.algorithms.heterofl import HeteroFL
from strategies.algorithms.ifca import IFCA
from strategies.algorithms.qfedavg import QFedAvg
from strategies.algorithms.robust.bulyan import Bulyan
from strategies.algorithms.robust.centered_clipping import CenteredClipping
from strategies.algorithms.robust.krum import Krum, MultiKrum
from strategies.algorithms.robust.median import Median
from strategies.algorithms.robust.rfa import RFA
from strategies.algorithms.robust.trimmed_mean import TrimmedMean
from strategies.algorithms.scaffold import Scaffold
from strategies.algorithms.server_data.feddf import FedDF
from strategies.algorithms.server_data.fltrust import FLTrust
from strategies.algorithms.server_data.server import needs_server, uses_labels
from strategies.client_rules import ClientRule, PlainSGD
from strategies.option_check import OptionError as OptionError
from strategies.option_check import resolve
from strategies.options import Option
from strategies.personalisation import LocalRule, NothingToShare, PersonalRule, unmatched
from strategies.strategy import Mode, Strategy


class Algorithm(Protocol):
    """A dataclass; each field is made by `strategies.options.field`."""

    def __init__(self, **options: Any) -> None: ...

    def build(self) -> Strategy: ...


ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "diloco": DiLoCo,
    "fedsgd": FedSGD,
    "fedprox": FedProx,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "scaffold": Scaffold,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "qfedavg": QFedAvg,
    "fedbuff": FedBuff,
    "fedasync": FedAsync,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbn": FedBN,
    "ditto": Ditto,
    "ifca": IFCA,
    "heterofl": HeteroFL,
    "feddf": FedDF,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "bulyan": Bulyan,
    "rfa": RFA,
    "centered_clipping": CenteredClipping,
    "fltrust": FLTrust,
}

OPTIONS: dict[str, dict[str, Option]] = {
    name: algorithm_options.of(algorithm) for name, algorithm in ALGORITHMS.items()
}


def get(name: str, **options: Any) -> Strategy:
    """The named strategy with its options.

    Raises:
        OptionError: unknown name or option (suggesting the nearest known one), or a value out of range.
    """
    values = resolve_options(name, options)
    return ALGORITHMS[name](**values).build()


def client_rule(name: str) -> ClientRule:
    """The client rule of strategy `name` with its default options; plain SGD if the name is not ours."""
    return get(name).client_rule if name in ALGORITHMS else PlainSGD()


def mixes_models(name: str) -> bool:
    """Whether strategy `name` is ours and mixes models (`Strategy`)."""
    return name in ALGORITHMS and get(name).mixes_models


def local_defaults(name: str) -> Mapping[str, Any]:
    """Options of local training that strategy `name` sets unless the experiment does; none if the name is not ours."""
    return get(name).local_defaults if name in ALGORITHMS else {}


def modes(name: str) -> tuple[Mode, ...]:
    """How the rounds of strategy `name` may follow each other, the usual way first; every way if the name is not ours."""
    return get(name).modes if name in ALGORITHMS else get_args(Mode)


def is_personal(name: str) -> bool:
    """Whether an algorithm gives each client a model of its own; not if it is not ours."""
    return name in ALGORITHMS and isinstance(get(name).client_rule, PersonalRule)


def personal_rule(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The client rule of an algorithm that gives each client a model of its own, for a task message; else empty."""
    return client_rules.to_options(get(name, **options).client_rule) if is_personal(name) else {}


def share(strategy: Strategy, trainable: Sequence[str]) -> tuple[str, ...]:
    """Names of the tensors that clients send, of those that they train.

    Raises:
        OptionError: a pattern of local tensors matches none of them, or the patterns match all.
    """
    rule = strategy.client_rule
    if not isinstance(rule, LocalRule):
        return rule.shared(trainable)
    patterns, is_default = list(rule.local), rule.local == OPTIONS[strategy.name]["local"].default
    try:
        shared = rule.shared(trainable)
    except NothingToShare as error:
        advice = _NO_NORMS if strategy.name == "fedbn" and is_default else "take other patterns"
        raise OptionError(f"{patterns} of {strategy.name!r}: {error}; {advice}", "local") from None
    # A default has a pattern for each way of naming.
    if not is_default and (left := unmatched(rule.local, trainable)):
        raise OptionError(f"{left[0]!r} matches no trained tensor; there are {', '.join(trainable)}", "local")
    return shared


_NO_NORMS = (
    "FedBN is for models with normalization layers, such as resnet8: take another model or strategy, or name the tensors of these "
    "layers"
)


def uses_server_data(name: str) -> bool:
    """Whether strategy `name` is ours and needs rows of the server's own."""
    return name in ALGORITHMS and needs_server(get(name))


def uses_server_labels(name: str) -> bool:
    """Whether the labels of the server's own rows count under strategy `name`."""
    return name in ALGORITHMS and uses_labels(get(name))


def is_robust(name: str) -> bool:
    """Whether strategy `name` bears malicious updates."""
    return "malicious" in OPTIONS.get(name, {})


def tolerated(name: str, updates: int) -> int:
    """The most malicious ones of so many updates that an algorithm bears; 0 if it is not robust."""
    if not is_robust(name):
        return 0
    possible = range(updates // 2, -1, -1)
    fits = (f for f in possible if get(name, malicious=f).aggregator.fewest_updates <= updates)
    return next(fits, 0)


def resolve_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of strategy `name`: those in `options`, checked, and defaults for the rest.

    Raises:
        OptionError: as `get`.
    """
    return resolve("strategy", OPTIONS, name, options)
