"""Self-tests a release in a separate process, so that a file that crashes its runtime crashes nothing else.

    python -P -m edge_client.infer FOLDER
    {"runtime": "litert", "accuracy": 0.97, "memory_bytes": 1163264}

`memory_bytes`: peak memory that opening the file and one inference added to the process. A release that this machine must
not use gives `{"runtime", "refused": "why"}` and exit code 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from edge_client.infer import golden_check
from edge_client.infer.runtime import RUNTIME, load
from edge_client.processes.process import peak_bytes, resident_bytes
from edge_client.train.golden import SelfTestFailed
from edge_client.train.interpreter import interpreter
from edge_client.wire.manifest import ManifestError


def main() -> int:
    answer: dict[str, object] = {"runtime": RUNTIME}
    try:
        interpreter()  # load the library before measuring: its memory is not the model's
        before = resident_bytes()
        loaded = load(Path(sys.argv[1]))
        loaded.predict(golden_check.synthetic_rows(loaded.manifest, 1))
        answer["memory_bytes"] = max(peak_bytes() - before, loaded.manifest.file.size_bytes)
        answer["accuracy"] = golden_check.require(loaded)
    except (ManifestError, SelfTestFailed) as error:
        answer["refused"] = str(error)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "refused" in answer else 0


if __name__ == "__main__":
    sys.exit(main())
