"""What a process imports before it has anything to do: nothing that only another command, or another process, needs.

Every import is paid by everybody who waits for a command. `tests.bench.start_up` shows what they cost.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = {"torch", "tensorflow", "jax", "litert_torch", "ai_edge_litert", "ai_edge_quantizer"}
PICTURES = {"matplotlib", "PIL"}
SCIENCE = {"sklearn", "scipy", "pandas", "sympy"}
SERVER = {"fastapi", "uvicorn", "sqlalchemy", "alembic", "psycopg", "tuf", "securesystemslib", "structlog"}
SPREAD = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining", "sympy"}

_NOT_FOR_RUNS = FRAMEWORKS | PICTURES | SCIENCE | SERVER
_NOT_TO_SERVE = {
    *(FRAMEWORKS | PICTURES | SCIENCE),
    *(
        "fastapi",
        "starlette",
        "sqlalchemy",
        "alembic",
        "psycopg",
        "tuf",
        "cryptography",
        "grpc",
        "google.protobuf",
        "tomlkit",
    ),
    *("coordinator.db", "coordinator.experiments.schema", "models.datasets.names", "strategies.strategy"),
}
"""What a process that serves models has no use for. gRPC is imported with `--grpc`, and what describes experiments for the folder of
a run."""
_HELP = "import sys; sys.argv = ['fedloop', '--help']\ntry: import _fedloop_command; _fedloop_command.main()\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    ("code", "never"),
    [
        pytest.param(_HELP, {*_NOT_FOR_RUNS, "numpy", "pydantic"}, id="fedloop --help"),
        pytest.param("import fedloop", _NOT_FOR_RUNS, id="import fedloop"),
        pytest.param(
            "import coordinator.commands.output, coordinator.commands.summaries, coordinator.experiments.experiment, coordinator.runs.simulation",
            _NOT_FOR_RUNS,
            id="fedloop simulate",
        ),
        pytest.param(
            "import coordinator.commands.output, coordinator.privacy.audit.audit",
            _NOT_FOR_RUNS,
            id="fedloop audit-privacy",
        ),
        pytest.param(
            "import coordinator.commands.output, coordinator.flower_apps.app_file, coordinator.flower_apps.run",
            {*_NOT_FOR_RUNS, "flwr", "numpy", "pydantic"},
            id="fedloop simulate --flower-app",
        ),
        pytest.param(
            "import coordinator.flower_apps.host", _NOT_FOR_RUNS - SERVER, id="the processes of a Flower app"
        ),
        pytest.param(
            "import coordinator.commands.output, coordinator.commands.summaries, coordinator.datacenter.pretraining, coordinator.datacenter.compression, coordinator.datacenter.release_export",
            _NOT_FOR_RUNS,
            id="fedloop pretrain, compress and export",
        ),
        pytest.param("import coordinator.server.serve", FRAMEWORKS | PICTURES | SCIENCE, id="fedloop serve"),
        pytest.param(
            "import coordinator.commands.cli, coordinator.server.logs, coordinator.datacenter.predictions, coordinator.serving.server",
            _NOT_TO_SERVE,
            id="fedloop serving start",
        ),
        pytest.param(
            "import edge_client.commands.cli, edge_client.daemon.main",
            {*_NOT_FOR_RUNS, "numpy", "pydantic"} - {"tuf", "securesystemslib"},
            id="fedloop-edge",
        ),
        pytest.param("import coordinator.workers.worker", _NOT_FOR_RUNS | {"pydantic"}, id="a worker"),
        pytest.param(
            "import models.datasets.job_arrays; models.datasets.job_arrays.datasets.load('digits', seed=0)",
            _NOT_FOR_RUNS | {"pydantic"},
            id="the process that loads data",
        ),
        pytest.param("import models.pretrain.check", SPREAD | PICTURES, id="a check of a plan"),
        pytest.param(
            "import models.compress.compression_process, models.release.inference",
            SPREAD | PICTURES,
            id="compress",
        ),
    ],
)
@pytest.mark.slow
def test_a_process_imports_nothing_that_only_others_need(code: str, never: set[str]) -> None:
    assert loaded_by(code, never) == []


@pytest.mark.slow
def test_a_forbidden_import_would_be_found() -> None:
    assert loaded_by("import torch.distributed.tensor", SPREAD) == ["sympy", "torch.distributed.tensor"]


def loaded_by(code: str, names: set[str]) -> list[str]:
    """Which of `names` a process has imported that has run `code`."""
    script = f"{code}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(names & set(json.loads(done.stdout.splitlines()[-1])))
