"""How many bytes a client's result takes on the wire, without encoding it: simulated clients report it for their updates."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from edge_client.wire import arrays
from edge_client.wire.device import TaskMessage
from strategies.params import flatten, shape_of
from strategies.update import Update


def measure_result(task: TaskMessage, update: Update) -> int:
    """How many bytes `encode_result` would return of a float32 update, or of one that a code has written."""
    if update.encoded is not None:
        return len(arrays.encode_result(task, update))
    tensors = flatten({arrays.DELTA: update.delta, **update.extras})
    shapes = tuple((name, shape_of(tensors, name)) for name in sorted(tensors))
    return ResultSizes.of(task.round, task.base, shapes).measure(
        task.client, update.num_examples, update.num_steps, update.train_loss
    )


@dataclass(frozen=True)
class ResultSizes:
    """How many bytes `encode_result` would return for float32 updates of one round and of one set of tensors.

    Attributes:
        text_bytes: JSON of a header whose client is empty and whose three figures are a digit each.
        data_bytes: values of all tensors.
    """

    text_bytes: int
    data_bytes: int

    @staticmethod
    @lru_cache(maxsize=8)
    def of(number: int, base: str, shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> ResultSizes:
        """Sizes of results of round `number`. `shapes`: of the streams' tensors, in sorted order."""
        values = asdict(arrays.ResultHeader(number, "", base, 0, 0, 0))
        return ResultSizes(
            len(arrays.encode_head(dict(shapes), values)), sum(4 * math.prod(shape) for _, shape in shapes)
        )

    def measure(self, client: str, num_examples: int, num_steps: int, train_loss: float) -> int:
        """Bytes of one client's result."""
        figures = len(json.dumps((num_examples, num_steps, train_loss))) - len("[0, 0, 0]")
        text = self.text_bytes + figures + _measure_text(client)
        return 8 + text + -text % 8 + self.data_bytes

    def measure_each(
        self, clients: Sequence[str], examples: Sequence[int], steps: Sequence[int], losses: Sequence[float]
    ) -> list[int]:
        """As `measure` of each client; the losses are finite."""
        fixed = 8 + self.data_bytes
        texts = [
            self.text_bytes + len(f"{count}{taken}{loss!r}") - 3 + _measure_text(client)
            for client, count, taken, loss in zip(clients, examples, steps, losses, strict=True)
        ]
        return [fixed + text + -text % 8 for text in texts]


@lru_cache(maxsize=4096)
def _measure_text(text: str) -> int:
    """Bytes between the quotes of a text within our JSON object, which is itself a text in the header's JSON."""
    return len(json.dumps(json.dumps(text))) - len(json.dumps(json.dumps("")))
