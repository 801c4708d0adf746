"""A file in tflite-micro, the interpreter for microcontrollers, and the arena that it needs.

    python -P -m models.compress.micro_interpreter FOLDER                            the self-test of a release
    {"runtime": "tflite-micro", "accuracy": 0.97, "arena_bytes": 58112}

    python -P -m models.compress.micro_interpreter MODEL.tflite ROWS.npy LOGITS.npy  the logits of many rows
    {"arena_bytes": 58112}

It runs in a separate process, because the interpreter ends the process if a model needs something unsupported. An interpreter
allocates everything in one array of bytes, the arena, whose minimum size is found by trial; on a 32-bit device it is somewhat
smaller, because it also holds pointers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tflite_micro.python.tflite_micro import runtime

from edge_client.infer import golden_check
from edge_client.infer.runtime import dequantize, quantize
from edge_client.train.golden import SelfTestFailed
from edge_client.wire import inference, rollouts
from edge_client.wire.manifest import ManifestError

LARGEST_ARENA = 16 * 2**20
"""More than any microcontroller has."""

_GRAIN = 256


class MicroModel:
    """One file in tflite-micro.

    Raises:
        RuntimeError: it does not support the file, or the arena is too small.
    """

    def __init__(self, content: bytes, arena_bytes: int = LARGEST_ARENA) -> None:
        self._interpreter = runtime.Interpreter.from_bytes(content, arena_size=arena_bytes)
        self._source = _details(self._interpreter.get_input_details(0))
        self._target = _details(self._interpreter.get_output_details(0))

    def predict(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits of rows [N, …], one at a time."""
        return np.concatenate([self._run(row[None]) for row in x])

    def _run(self, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self._interpreter.set_input(quantize(np.ascontiguousarray(x), self._source), 0)
        self._interpreter.invoke()
        return dequantize(self._interpreter.get_output(0), self._target)


def arena_bytes(content: bytes) -> int:
    """The smallest arena that the file runs in, rounded up to 256 bytes.

    Raises:
        RuntimeError: it runs in none.
    """
    MicroModel(content)
    low, high = 0, LARGEST_ARENA // _GRAIN
    while high - low > 1:
        middle = (low + high) // 2
        if _runs(content, middle * _GRAIN):
            high = middle
        else:
            low = middle
    return high * _GRAIN


def _runs(content: bytes, arena_bytes: int) -> bool:
    """Whether that arena is large enough; tested in a child, because a much too small one may crash (signal 11)."""
    child = os.fork()
    if not child:
        status = 1
        try:
            MicroModel(content, arena_bytes)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status == 0


def main() -> int:
    answer = _self_test(Path(sys.argv[1])) if len(sys.argv) == 2 else _predict(*map(Path, sys.argv[1:]))
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "refused" in answer else 0


def _predict(model: Path, rows: Path, logits: Path) -> dict[str, object]:
    content = model.read_bytes()
    arena = arena_bytes(content)
    answers = MicroModel(content, arena).predict(np.load(rows, allow_pickle=False))
    np.save(logits, answers, allow_pickle=False)
    return {"arena_bytes": arena}


def _self_test(folder: Path) -> dict[str, object]:
    answer: dict[str, object] = {"runtime": "tflite-micro"}
    try:
        manifest = inference.from_json((folder / rollouts.MANIFEST_NAME).read_bytes())
        content = (folder / rollouts.MODEL_NAME).read_bytes()
        answer["arena_bytes"] = arena_bytes(content)
        answer["accuracy"] = golden_check.require_answers(MicroModel(content).predict, manifest)
    except (ManifestError, SelfTestFailed) as error:
        answer["refused"] = str(error)
    except RuntimeError as error:
        answer["refused"] = f"tflite-micro does not support it: {' '.join(str(error).split())}"
    return answer


def _details(tensor: dict[str, Any]) -> dict[str, Any]:
    """A tensor's description in the format of the other runtimes."""
    parameters = tensor["quantization_parameters"]
    scales, zeros = parameters["scales"], parameters["zero_points"]
    return {"dtype": tensor["dtype"], "quantization": (scales[0], zeros[0]) if len(scales) else (0.0, 0)}


if __name__ == "__main__":
    sys.exit(main())
