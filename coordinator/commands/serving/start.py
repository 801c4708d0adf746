"""`fedloop serving start`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from coordinator import extras, option_parsers
from coordinator.commands.serving.calls import AllowCode, Home, home_of
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, connect

File = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FILE.toml]",
        help="Deployments, besides those that this home has already. Without any, `fedloop serving deploy` adds them.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File with the token that every request must have; needed off loopback."
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", help="Certificate of the server, PEM; needed off loopback.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="Its private key, PEM.")]
FollowSeconds = Annotated[
    float,
    typer.Option("--follow-seconds", min=0.05, max=3600, help="Between two looks at what an alias means."),
]
Listen = Annotated[str, typer.Option("--listen", help="Where REST is answered.", metavar="HOST:PORT")]
Grpc = Annotated[
    str | None,
    typer.Option(
        "--grpc", help="Where gRPC is answered. Default: nowhere.", metavar="HOST:PORT", show_default=False
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Memory of all workers, such as 4GB: models without requests leave first, and come back with the next one. Default: "
        "no limit.",
        metavar="SIZE",
        show_default=False,
    ),
]


def start(
    file: File = None,
    home: Home = None,
    listen: Listen = "127.0.0.1:8090",
    grpc: Grpc = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    allow_code: AllowCode = None,
    memory: Memory = None,
    follow_seconds: FollowSeconds = 2.0,
    log_format: Annotated[str, typer.Option("--log-format", help="text or json.")] = "text",
    coordinator: Coordinator = None,
) -> None:
    """Serve deployments until stopped. What was deployed in this home before is served again."""
    _require_installed()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy only copies rows here
    from coordinator.datacenter import predictions
    from coordinator.server import logs
    from coordinator.serving import deployments, server

    address = _address("--listen", listen)
    if log_format not in ("text", "json"):
        raise UserError(f"--log-format {log_format!r}: expected text or json")
    given = {} if file is None else deployments.load(file)
    logs.configure(log_format)
    settings = server.ServerSettings(
        home_of(home),
        address,
        token_file,
        tls_cert,
        tls_key,
        tuple(allow_code or ()),
        follow_seconds,
        None if grpc is None else _address("--grpc", grpc),
        0 if memory is None else _bytes("--memory", memory),
    )
    server.serve(
        settings,
        given,
        lambda: connect(coordinator),
        predictions.open_model,
        lambda event: typer.echo(json.dumps(event)),
    )


def _require_installed() -> None:
    """Raises: UserError: libraries that a server needs are not installed."""
    if lacking := extras.missing("inference serving"):
        raise UserError(
            f"serving models needs {', '.join(lacking)}, not installed here; {extras.how_to_install('inference serving')}"
        )


def _address(option: str, text: str) -> option_parsers.Address:
    try:
        return option_parsers.address(text)
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}") from None


def _bytes(option: str, text: str) -> int:
    try:
        return int(option_parsers.quantity(option_parsers.BYTES, "4GB")(text))
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {error}") from None
