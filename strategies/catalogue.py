"""The catalogue describes every algorithm: what it does, its paper, how its rounds follow each other, what it bears, its options;
and every code for updates.

All of it is taken from the algorithm or the code itself. The first line of its docstring, or of its module's, says what it does and ends
with the source.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies import presets
from strategies.codes import known
from strategies.options import Option
from strategies.strategy import Mode

PAPERS = {
    "Acar 2021": ("Federated Learning Based on Dynamic Regularization", "2111.04263"),
    "Alistarh 2017": (
        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
        "1610.02132",
    ),
    "Arivazhagan 2019": ("Federated Learning with Personalization Layers", "1912.00818"),
    "Blanchard 2017": ("Byzantine-Tolerant Machine Learning", "1703.02757"),
    "Cao 2021": ("FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", "2012.13995"),
    "Collins 2021": ("Exploiting Shared Representations for Personalized Federated Learning", "2102.07078"),
    "Diao 2021": (
        "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
        "2010.01264",
    ),
    "Douillard 2023": ("DiLoCo: Distributed Low-Communication Training of Language Models", "2311.08105"),
    "El Mhamdi 2018": ("The Hidden Vulnerability of Distributed Learning in Byzantium", "1802.07927"),
    "Ghosh 2020": ("An Efficient Framework for Clustered Federated Learning", "2006.04088"),
    "Hsu 2019": (
        "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        "1909.06335",
    ),
    "Karimireddy 2019": ("Error Feedback Fixes SignSGD and other Gradient Compression Schemes", "1901.09847"),
    "Karimireddy 2020": ("SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", "1910.06378"),
    "Karimireddy 2021": ("Learning from History for Byzantine Robust Optimization", "2012.10333"),
    "Li 2019": ("Fair Resource Allocation in Federated Learning", "1905.10497"),
    "Li 2020": ("Federated Optimization in Heterogeneous Networks", "1812.06127"),
    "Li 2021a": (
        "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
        "2102.07623",
    ),
    "Li 2021b": (
        "Ditto: Fair and Robust Federated Learning Through Personalization",
        "2012.04221",
    ),
    "Lin 2020": ("Ensemble Distillation for Robust Model Fusion in Federated Learning", "2006.07242"),
    "McMahan 2017": (
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "1602.05629",
    ),
    "Nguyen 2022": ("Federated Learning with Buffered Asynchronous Aggregation", "2106.06639"),
    "Pillutla 2022": ("Robust Aggregation for Federated Learning", "1912.13445"),
    "Reddi 2021": ("Adaptive Federated Optimization", "2003.00295"),
    "Stich 2018": ("Sparsified SGD with Memory", "1809.07599"),
    "Vargaftik 2021": ("DRIVE: One-bit Distributed Mean Estimation", "2105.08339"),
    "Vargaftik 2022": (
        "EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning",
        "2108.08842",
    ),
    "Vogels 2019": (
        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        "1905.13727",
    ),
    "Wang 2020": (
        "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        "2007.07481",
    ),
    "Xie 2019": ("Asynchronous Federated Optimization", "1903.03934"),
    "Yin 2018": (
        "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
        "1803.01498",
    ),
}
"""Authors and year, as docstrings cite them -> title, and number at arXiv."""

RUNTIMES = ("litert", "torch", "tensorflow")
"""Runtimes that take the corrected step of every client rule (`strategies.client_rules`); an algorithm may name fewer as `runtimes`."""

SHARED = ("weighting", "clip_norm", "malicious", "mix_neighbours", "norm_clip")
"""Options of many strategies, which the page explains for all of them."""

_FIRST_LINE = re.compile(r"[^:]+: (?P<meaning>.+\.) (?P<cited>[A-Z][\w ]+ \d{4}[a-z]?), (?P<place>.+)\.")


def _find_paper(cited: str) -> tuple[str, str]:
    title, number = PAPERS[cited]
    return title, f"https://arxiv.org/abs/{number}"


def _paper_to_json(cited: str, place: str) -> dict[str, str]:
    title, address = _find_paper(cited)
    return {"cited": cited, "place": place, "title": title, "address": address}


@dataclass(frozen=True)
class Description:
    """One algorithm.

    Attributes:
        place: the section, algorithm or equation of the paper.
        fewest_updates: that a round needs with the default options.
        malicious: how many malicious clients of how many it bears, in words; empty: none.
        limits: where alone it works, in words; empty: in simulations and on devices.
        needs_server_data: whether the server needs rows of its own.
    """

    name: str
    meaning: str
    cited: str
    place: str
    modes: tuple[Mode, ...]
    runtimes: tuple[str, ...]
    fewest_updates: int
    malicious: str
    options: dict[str, Option]
    limits: str = ""
    needs_server_data: bool = False

    @property
    def paper(self) -> tuple[str, str]:
        """Title and address."""
        return _find_paper(self.cited)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "strategy",
            "name": self.name,
            "meaning": self.meaning,
            "paper": _paper_to_json(self.cited, self.place),
            "modes": list(self.modes),
            "runtimes": list(self.runtimes),
            "fewest_updates": self.fewest_updates,
            "malicious": self.malicious,
            "limits": self.limits,
            "needs_server_data": self.needs_server_data,
            "options": _options_to_json(self.options),
        }


@dataclass(frozen=True)
class CodeDescription:
    """One code for updates.

    Attributes:
        place: the section, algorithm or equation of the paper.
        error_feedback: whether a client adds what a round did not send to its next update.
    """

    name: str
    meaning: str
    cited: str
    place: str
    error_feedback: bool
    options: dict[str, Option]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """How rounds may follow each other: clients of an asynchronous run keep nothing."""
        return ("sync",) if self.error_feedback else ("sync", "async")

    @property
    def runtimes(self) -> tuple[str, ...]:
        """All of them, because the update is made by then."""
        return RUNTIMES

    @property
    def paper(self) -> tuple[str, str]:
        """Title and address."""
        return _find_paper(self.cited)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "code",
            "name": self.name,
            "meaning": self.meaning,
            "paper": _paper_to_json(self.cited, self.place),
            "modes": list(self.modes),
            "runtimes": list(self.runtimes),
            "error_feedback": self.error_feedback,
            "options": _options_to_json(self.options),
        }


def describe_code(name: str) -> CodeDescription:
    """The description of a known code."""
    found = _first_line(known.CODES[name])
    return CodeDescription(
        name,
        found["meaning"],
        found["cited"],
        found["place"],
        known.get(name).error_feedback,
        known.OPTIONS[name],
    )


def describe_codes() -> list[CodeDescription]:
    """All codes, in the order in which they are listed."""
    return [describe_code(name) for name in known.CODES]


def codes_to_markdown() -> str:
    """A table of all codes, for the documentation."""
    lines = ["| code | what is sent | source | options |", "| --- | --- | --- | --- |"]
    for each in describe_codes():
        title, address = each.paper
        options = ", ".join(
            f"`{key} = {option.default_text}`: {option.describe_range()}"
            for key, option in each.options.items()
        )
        meaning = each.meaning.removesuffix(".")
        lines.append(
            f'| `{each.name}` | {meaning} | [{each.cited}]({address} "{title}"), {each.place} | {options} |'
        )
    return "\n".join(lines)


def _options_to_json(options: Mapping[str, Option]) -> dict[str, Any]:
    return {
        key: {"default": each.default, "expected": each.describe_range(), "meaning": each.meaning}
        for key, each in options.items()
    }


def _first_line(documented: type) -> re.Match[str]:
    """What the first line of its docstring, or of its module's, says."""
    texts = (documented.__doc__, sys.modules[documented.__module__].__doc__)
    lines = [(text or "").split("\n")[0] for text in texts]
    found = next(filter(None, map(_FIRST_LINE.fullmatch, lines)), None)
    assert found is not None, (
        f"{documented}: no docstring begins with 'Name: what it does. Source 2020, place.'"
    )
    return found


def describe(name: str) -> Description:
    """The description of a known algorithm."""
    algorithm = presets.ALGORITHMS[name]
    found = _first_line(algorithm)
    strategy = presets.get(name)
    return Description(
        name=name,
        meaning=found["meaning"],
        cited=found["cited"],
        place=found["place"],
        modes=strategy.modes,
        runtimes=getattr(algorithm, "runtimes", RUNTIMES),
        fewest_updates=strategy.aggregator.fewest_updates,
        malicious=getattr(algorithm, "bears", "") or _tolerance(name),
        options=presets.OPTIONS[name],
        limits=getattr(algorithm, "limits", ""),
        needs_server_data=presets.uses_server_data(name),
    )


def describe_all() -> list[Description]:
    """All algorithms, in the order in which they are listed."""
    return [describe(name) for name in presets.ALGORITHMS]


def to_markdown() -> str:
    """Two tables of all algorithms, for the documentation: what each does, and the options of its own."""
    meanings = ["| name | what it does | source | rounds | bears |", "| --- | --- | --- | --- | --- |"]
    options = ["| name | options of its own |", "| --- | --- |"]
    for each in describe_all():
        title, address = each.paper
        source = f'[{each.cited}]({address} "{title}"), {each.place}'
        meaning, modes = each.meaning.removesuffix("."), ", ".join(each.modes)
        meanings.append(f"| `{each.name}` | {meaning} | {source} | {modes} | {each.malicious} |")
        shown = (
            f"`{key} = {option.default_text}`" for key, option in each.options.items() if key not in SHARED
        )
        options.append(f"| `{each.name}` | {', '.join(shown)} |")
    return "\n".join([*meanings, "", *options])


def _tolerance(name: str) -> str:
    """How `tolerated` grows with the updates of a round, in words."""
    if "malicious" not in presets.OPTIONS[name]:
        return ""
    one, two = (presets.get(name, malicious=count).aggregator.fewest_updates for count in (1, 2))
    return f"f of {two - one}f + {2 * one - two}"
