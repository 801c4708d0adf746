"""Measures the memory that one file uses in LiteRT, in a process that does nothing else.

python -P -m models.compress.litert_process MODEL.tflite
{"memory_bytes": 1163264}

The peak memory added by opening the file and one inference, without the library itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edge_client.processes.process import peak_bytes, resident_bytes
from edge_client.train.interpreter import interpreter


def main() -> None:
    path = Path(sys.argv[1])
    kind = interpreter()
    before = resident_bytes()
    model = kind(model_path=str(path), num_threads=1)
    model.allocate_tensors()
    model.invoke()
    sys.stdout.write(json.dumps({"memory_bytes": max(peak_bytes() - before, path.stat().st_size)}) + "\n")


if __name__ == "__main__":
    main()
