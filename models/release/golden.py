"""The golden rows of a release: inputs that every runtime must answer correctly, the answers, and their tolerance.

The tolerance is measured. A quantized file has errors, and another correct kernel rounds differently: its answers lie about as
far from the float model's as those of the available kernels. The tolerance is `MARGIN` times the largest error seen, and at
least what float sums in another order need. Beyond `MAX_LOOSENESS` of the span of the logits, wrong answers could pass (four-bit
weights, or ranges that clip). Then the file's reference kernels give the expected answers in place of the float model. A
file whose kernels differ by more than that is not released.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import nn

from edge_client.infer import golden_check
from edge_client.wire.inference import GoldenRows, InferenceManifest
from edge_client.wire.manifest import Fill, Tolerance
from models.compress.report import logits as logits_of
from models.conversion.convert import TOLERANCE as FLOAT_TOLERANCE
from models.labels import PADDING

MARGIN = 2.0
"""Multiple of the largest error seen; see above."""

MAX_LOOSENESS = 0.1
"""Largest tolerance, as a share of the span of a row's logits; beyond it, wrong answers could pass."""

_MAX_NUMBERS = 16_384
"""Numbers of real rows in a manifest, which every device fetches; one row is always allowed."""

LARGEST_ROW = 262_144
"""Numbers in a row that a manifest can hold, about 6 MB of it: a picture of 3 x 256 x 256 fits."""

_CANDIDATES = 64
"""Candidate rows if the manifest has room for few: those with the most certain answers show most."""

Rows = npt.NDArray[Any]
Logits = npt.NDArray[np.float32]
Predict = Callable[[Rows], Logits]


class NotReleasable(ValueError):
    """The file must not be sent to devices; the message says what is wrong with it."""


@dataclass(frozen=True)
class GoldenAnswers:
    """Expected logits of synthetic rows.

    Attributes:
        fill: how the synthetic rows are spread.
        error: the largest difference from an answer of the available kernels.
        reference: what computed the logits.
    """

    fill: Fill
    logits: Logits
    error: float
    reference: Literal["float model", "file"]

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(max(MARGIN * self.error, FLOAT_TOLERANCE.absolute), FLOAT_TOLERANCE.relative)

    @property
    def looseness(self) -> float:
        """The tolerance as a share of the span of a row's logits, or of all rows' if each has one."""
        return self.tolerance.absolute / max(self.span, 1e-30)

    @property
    def span(self) -> float:
        """The median span of a row's logits; of a quantity the span of its values over the rows."""
        if self.logits.shape[-1] == 1:
            return float(np.ptp(self.logits))
        return float(np.median(np.ptp(self.logits, -1)))


def compute_answers(
    module: nn.Module | None,
    draft: InferenceManifest,
    kernels: Mapping[str, Predict],
    x: Rows,
    count: int,
) -> GoldenAnswers:
    """The answers to `count` synthetic rows, spread so that an error shows most clearly.

    Args:
        module: the float model; without one, the file's reference kernels give the answers.
        x: test rows, whose spread the synthetic rows resemble.

    Raises:
        NotReleasable: the kernels of one runtime differ by so much that no answer is known to be right.
    """
    if module is not None:
        answers = _tightest("float model", lambda rows: logits_of(module, rows), draft, kernels, x, count)
        if answers.looseness <= MAX_LOOSENESS:
            return answers
        if draft.precision == "float32":
            raise NotReleasable(
                f"the float32 file's logits are off by {answers.error:.3g} from the float model's; an operation was converted wrongly"
            )
    answers = _tightest("file", kernels["reference"], draft, kernels, x, count)
    if answers.looseness > MAX_LOOSENESS:
        raise NotReleasable(
            f"kernels of one runtime differ by {answers.error:.3g} in the {draft.precision} file's logits, which span "
            f"{answers.span:.3g}: answers may be off by {answers.looseness:.0%} of that; at most "
            f"{MAX_LOOSENESS:.0%} distinguishes right from wrong; compress the model in another precision (dynamic-int8, float32)"
        )
    return answers


def _tightest(
    reference: Literal["float model", "file"],
    predict: Predict,
    draft: InferenceManifest,
    kernels: Mapping[str, Predict],
    x: Rows,
    count: int,
) -> GoldenAnswers:
    """The answers of `predict` to the synthetic rows with the least looseness."""
    candidates = []
    for fill in _fills(x):
        manifest = replace(draft, golden=replace(draft.golden, x=fill))
        rows = golden_check.synthetic_rows(manifest, count)
        expected = golden_check.last_position(predict(rows))
        answers = [golden_check.last_position(kernel(rows)) for kernel in kernels.values()]
        error = max(float(np.abs(answer - expected).max()) for answer in answers)
        if not np.isfinite(error):
            raise NotReleasable("the model's logits are not finite on ordinary rows")
        candidates.append(GoldenAnswers(fill, expected, error, reference))
    return min(candidates, key=lambda answers: answers.looseness)


def _fills(x: Rows) -> list[Fill]:
    """Spreads of about the data's size; they reveal only a power of two and a sign of it. Ids need none."""
    if x.dtype != np.float32:
        return [Fill(0.0, 0.0)]
    size = math.sqrt(float(np.square(x, dtype=np.float64).mean())) or 1.0
    scale = 2.0 ** round(math.log2(size))
    offset = scale if float(x.min()) >= 0 else 0.0
    return [Fill(offset, scale * share) for share in (0.5, 1.0, 2.0)]


def add_real_rows(
    answers: GoldenAnswers,
    predict: Predict,
    x: Rows,
    y: npt.NDArray[np.int32],
    limit: int,
    rng: np.random.Generator,
) -> GoldenRows:
    """The golden rows with at most `limit` real rows, and the accuracy that a runtime must reach on them.

    That accuracy counts only rows whose two best classes differ by more than rounding can change.

    Raises:
        NotReleasable: a row is too large for a manifest.
    """
    logits = tuple(_numbers(row) for row in answers.logits)
    classes = y if y.ndim == 1 else y[:, -1]
    usable = rng.permutation(np.flatnonzero(classes != PADDING))
    available = min(limit, len(usable))
    count = min(available, max(1, _MAX_NUMBERS // x[0].size))
    if not count:
        return GoldenRows(answers.fill, logits, answers.tolerance)
    if x[0].size > LARGEST_ROW:
        raise NotReleasable(
            f"real_rows = {limit}: a row has {x[0].size:,} numbers, a manifest holds at most {LARGEST_ROW:,}; omit real rows: "
            "synthetic rows need no space"
        )
    candidates = np.sort(usable[: max(count, _CANDIDATES) if count < available else count])
    certain = _certain(predict, x[candidates], classes[candidates], answers.tolerance)
    kept = np.sort(np.argsort(~certain, kind="stable")[:count])
    chosen = candidates[kept]
    return GoldenRows(
        answers.fill,
        logits,
        answers.tolerance,
        tuple(_numbers(row) for row in x[chosen].reshape(count, -1)),
        tuple(int(label) for label in classes[chosen]),
        float(certain[kept].mean()),
    )


def _certain(
    predict: Predict, x: Rows, classes: npt.NDArray[np.int32], tolerance: Tolerance
) -> npt.NDArray[np.bool_]:
    """Which rows are classified correctly by more than the tolerance can change."""
    logits = golden_check.last_position(predict(x))
    first, second = np.sort(logits, -1)[:, ::-1][:, :2].T if logits.shape[-1] > 1 else (logits[:, 0], -np.inf)
    safe = first - second > 2 * (tolerance.absolute + tolerance.relative * np.abs(first))
    return np.asarray((logits.argmax(-1) == classes) & safe)


def _numbers(row: npt.NDArray[Any]) -> tuple[float, ...]:
    """The shortest decimals that restore these float32 numbers."""
    return tuple(float(str(value)) for value in row)
