"""Runs one file on many rows in tflite-micro, in a process that imports nothing else.

python -P -m models.compress.micro_process MODEL.tflite ROWS.npy LOGITS.npy
{"arena_bytes": 58112}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from models.compress.micro_selftest import MicroModel, arena_bytes


def main() -> None:
    model, rows, logits = map(Path, sys.argv[1:])
    content = model.read_bytes()
    arena = arena_bytes(content)
    answers = MicroModel(content, arena).predict(np.load(rows, allow_pickle=False))
    np.save(logits, answers, allow_pickle=False)
    sys.stdout.write(json.dumps({"arena_bytes": arena}) + "\n")


if __name__ == "__main__":
    main()
