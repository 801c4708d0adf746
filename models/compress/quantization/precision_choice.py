"""Chooses the precision of a model by measuring on this machine: int8 is not always smaller and faster.

A model of small matrices (attention, recurrence) may be several times slower in int8 than in float32, and one of few weights may
grow by the added operations. So the file is made in each precision of `CANDIDATES`. Of those within the bound on accuracy, measured
on training rows, the one with the lowest product of bytes and latency wins: half the size is worth twice the time. Latencies are
interleaved medians.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy.typing as npt
from torch import nn

from edge_client.train.trainer import score
from models.compress import report
from models.compress.step import Data, Precision, StepRefused

CANDIDATES: tuple[Precision, ...] = ("float32", "dynamic-int8", "static-int8")
ROWS = 500
"""At most so many training rows are scored; test rows are reserved for the report."""


class _Limits(Protocol):
    """The relevant options."""

    @property
    def calibration_rows(self) -> int: ...

    @property
    def max_accuracy_drop(self) -> float: ...


@dataclass(frozen=True)
class Candidate:
    """A candidate. `refused`: why it is excluded; empty if it is eligible."""

    precision: Precision
    bytes: int = 0
    latency_us: float = 0.0
    accuracy: float = 0.0
    refused: str = ""

    @property
    def cost(self) -> float:
        return self.bytes * self.latency_us


def choose(
    float32: bytes,
    data: Data,
    limits: _Limits,
    on_progress: Callable[[Mapping[str, Any]], None],
    make: Callable[[bytes, Precision, Data, int], bytes],
    latency: Callable[[Mapping[str, nn.Module | bytes], npt.NDArray[Any]], dict[str, float]] = report.latency,
) -> tuple[Precision, bytes, dict[str, Any]]:
    """The precision of the lowest cost, its file, and the figures of each candidate as facts.

    Args:
        make: quantizes the float32 file to a precision, with data and the number of rows to calibrate on.
        latency: measures files on rows, as `report.latency`.
    """
    files: dict[Precision, bytes] = {}
    refused: dict[Precision, str] = {}
    for precision in CANDIDATES:
        on_progress({"step": "quantize", "precision": precision})
        try:
            files[precision] = make(float32, precision, data, limits.calibration_rows)
        except StepRefused as error:
            refused[precision] = str(error)
        except OSError:  # a full disk is not the candidate's fault
            raise
        except Exception as error:  # the quantizer raises anything for an unknown operation
            refused[precision] = str(error).strip().partition("\n")[0][:300] or type(error).__name__
    x, y = data.x_train[-ROWS:], data.y_train[-ROWS:]
    latencies = latency({str(name): file for name, file in files.items()}, x)
    accuracies = {name: float(score(report.logits(file, x), y).accuracy) for name, file in files.items()}
    candidates = [Candidate(name, refused=reason) for name, reason in refused.items()]
    for name, file in files.items():
        lost = accuracies["float32"] - accuracies[name]
        reason = (
            f"loses {100 * lost:.1f} points of accuracy" if lost > limits.max_accuracy_drop + 1e-9 else ""
        )
        candidates.append(Candidate(name, len(file), latencies[name], accuracies[name], reason))
    chosen = min((each for each in candidates if not each.refused), key=lambda each: each.cost)
    facts = {"rows": len(x), "tried": [asdict(each) for each in candidates]}
    return chosen.precision, files[chosen.precision], {"measured": facts}
