"""`python -m tests.support.grpc_messages`: generates the messages of inference serving over gRPC from their proto file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from coordinator.serving import grpc_api

FOLDER = Path(grpc_api.__file__).parent
PROTO = "open_inference_grpc.proto"
GENERATED = ("open_inference_grpc_pb2.py", "open_inference_grpc_pb2.pyi")


def generate(folder: Path) -> None:
    """Writes the files of `GENERATED` into `folder`."""
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={FOLDER}"),
            *(f"--python_out={folder}", f"--pyi_out={folder}", PROTO),
        ],
        check=True,
    )


if __name__ == "__main__":
    generate(FOLDER)
