"""A second version beside the one of a deployment: a shadow, which answers nobody, or a canary, which answers a share of the requests.

    shadow   gets the rows of every request after the deployment's version; its logits are compared and thrown away
    canary   answers a share of the requests that name no version, in place of the deployment's version

A companion never makes a request wait or fail: a shadow that has fallen behind leaves rows out, and a canary that is not ready gets none.
The figures of both become metrics of their version in the registry.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from coordinator.errors import Refusal
from coordinator.serving.queue import Waiting

if TYPE_CHECKING:
    from coordinator.serving.deployment import Deployment

Kind = Literal["shadow", "canary"]
_BEHIND_BATCHES = 4
"""Full batches that may wait for a shadow; rows beyond are left out."""
_LIMIT_SECONDS = 30.0
_SHADOW_PRIORITY = 0  # the lowest


@dataclass
class Figures:
    """What a companion has done since its version was opened. `agreements`: rows with the same class, for a shadow."""

    requests: int = 0
    failed: int = 0
    rows: int = 0
    left_out: int = 0
    agreements: int = 0
    difference: float = 0.0
    """Sum over rows of the largest difference of a logit."""
    seconds: float = 0.0
    """Sum over requests."""

    def metrics(self, kind: Kind) -> dict[str, float]:
        """As the registry keeps them."""
        found: dict[str, float] = {"requests": self.requests, "failed": self.failed, "rows": self.rows}
        if self.requests > self.failed:
            found["mean_ms"] = 1000 * self.seconds / (self.requests - self.failed)
        if kind == "shadow":
            found["left_out_rows"] = self.left_out
            if self.rows:
                found["agreement"] = self.agreements / self.rows
                found["mean_difference"] = self.difference / self.rows
        return found


@dataclass
class Companion:
    """`deployment`: follows the companion's reference as any other. `share`: of requests, for a canary."""

    kind: Kind
    deployment: Deployment
    share: float = 0.0
    figures: Figures = field(default_factory=Figures)
    version: str = ""
    recorded: dict[str, float] = field(default_factory=dict)
    _owed: float = 0.0

    def current(self) -> Figures:
        """The figures of the version that answers now; they begin anew with each version."""
        active = self.deployment.active
        if active is not None and active.number != self.version:
            self.version, self.figures, self.recorded = active.number, Figures(), {}
        return self.figures

    def takes_next(self) -> bool:
        """Whether the next request is for the canary: exactly its share of them, evenly spread."""
        if self.kind != "canary" or self.deployment.active is None:
            return False
        self._owed += self.share
        if self._owed < 1:
            return False
        self._owed -= 1
        return True

    def observe(self, seconds: float, rows: int, failed: bool) -> None:
        """A request that the canary has answered."""
        figures = self.current()
        figures.requests += 1
        figures.failed += failed
        if not failed:
            figures.rows += rows
            figures.seconds += seconds

    def compare(self, x: npt.NDArray[Any], expected: npt.NDArray[np.float32]) -> None:
        """Gives rows to the shadow. `expected`: the logits of the deployment's version."""
        active, form = self.deployment.active, self.deployment.form
        if self.kind != "shadow" or active is None or form is None:
            return
        figures = self.current()
        most = active.opening.max_batch
        if form.output_shape != expected.shape[1:] or form.input_shape != x.shape[1:]:
            figures.requests += 1
            figures.failed += 1
            return
        if active.waiting_rows > _BEHIND_BATCHES * most:
            figures.left_out += len(x)
            return
        now = asyncio.get_running_loop().time()
        for at in range(0, len(x), most):
            part = expected[at : at + most]

            def done(found: Any, queued: float, computed: float, part: npt.NDArray[Any] = part) -> None:
                figures.requests += 1
                if isinstance(found, Refusal):
                    figures.failed += 1
                    return
                figures.rows += len(part)
                figures.seconds += computed
                figures.agreements += int(
                    (found.argmax(-1) == part.argmax(-1)).reshape(len(part), -1).all(1).sum()
                )
                figures.difference += float(np.abs(found - part).reshape(len(part), -1).max(1).sum())

            active.submit(
                Waiting(
                    x[at : at + most],
                    now + _LIMIT_SECONDS,
                    _SHADOW_PRIORITY,
                    now,
                    done,
                    patience=_LIMIT_SECONDS,
                )
            )

    def status(self) -> dict[str, Any]:
        """For people: its version, figures, and why it does not answer if it does not."""
        deployment = self.deployment
        self.current()
        return {
            "model": deployment.section.model,
            "version": self.version,
            "ready": deployment.active is not None,
            "reason": deployment.reason,
            **({"share": self.share} if self.kind == "canary" else {}),
            **self.figures.metrics(self.kind),
        }
