"""Where a server listens: REST and gRPC with TLS and a token, and what it does not begin without."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import urllib3

from coordinator import extras
from coordinator.serving.grpc_api import open_inference_grpc_pb2 as pb
from coordinator.serving.grpc_api import servicer
from tests.support.cli import run_here
from tests.support.fake_coordinator import Authority
from tests.support.serving import serving, torch_model

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef-token"


@dataclass(frozen=True)
class Files:
    ca: Path
    certificate: Path
    key: Path
    token: Path

    @property
    def options(self) -> list[str]:
        return [
            *("--tls-cert", str(self.certificate), "--tls-key", str(self.key)),
            *("--token-file", str(self.token)),
        ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority()
    both = authority.server((-1.0, 1.0)).decode()
    at = both.index("-----BEGIN PRIVATE KEY")
    found = Files(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", folder / "token")
    found.ca.write_text(authority.pem)
    found.certificate.write_text(both[:at])
    found.key.write_text(both[at:])
    found.token.write_text(TOKEN + "\n")
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("serving")
    deployments = folder / "serving.toml"
    deployments.write_text(f'[deployment.digits]\nmodel = "{torch_model(folder / "mlp")}"\n')
    with serving(folder / "home", str(deployments), "--grpc", "127.0.0.1:0", *files.options) as running:
        yield dict(running.place)


@pytest.fixture
def channel(place: dict[str, Any], files: Files) -> Iterator[grpc.Channel]:
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    with grpc.secure_channel(local(place["grpc"]), credentials) as opened:
        yield opened


def local(address: str) -> str:
    """By the name in the certificate."""
    return f"localhost:{address.rpartition(':')[2]}"


def ready(channel: grpc.Channel, token: str | None) -> bool:
    call = channel.unary_unary(
        f"/{servicer.NAME}/ModelReady",
        pb.ModelReadyRequest.SerializeToString,
        pb.ModelReadyResponse.FromString,
    )
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    return bool(call(pb.ModelReadyRequest(name="digits"), metadata=metadata, timeout=30).ready)


def test_grpc_over_tls_takes_the_token(channel: grpc.Channel) -> None:
    assert ready(channel, TOKEN)
    for wrong in (None, TOKEN[:-1], ""):
        with pytest.raises(grpc.RpcError) as caught:
            ready(channel, wrong)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_rest_over_tls_takes_the_token(place: dict[str, Any], files: Files) -> None:
    url = f"https://{local(place['url'])}"
    with urllib3.PoolManager(ca_certs=str(files.ca), retries=False, timeout=30) as pool:
        assert pool.request("GET", f"{url}/v2/health/live").status == 200
        assert pool.request("GET", f"{url}/v2/models/digits").status == 401
        answer = pool.request("GET", f"{url}/v2/models/digits", headers={"Authorization": f"Bearer {TOKEN}"})
        assert json.loads(answer.data)["name"] == "digits"


def test_plain_clients_get_no_answer(place: dict[str, Any]) -> None:
    with grpc.insecure_channel(local(place["grpc"])) as plain, pytest.raises(grpc.RpcError) as caught:
        ready(plain, TOKEN)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def refused(tmp_path: Path, *options: str) -> str:
    done = run_here("serving", "start", "--home", str(tmp_path / "home"), "--listen", "127.0.0.1:0", *options)
    assert done.returncode == 2, done.stdout
    return done.stderr


def test_grpc_off_loopback_needs_tls_and_a_token(tmp_path: Path, files: Files) -> None:
    for options in ([], files.options[:4], files.options[4:]):
        message = refused(tmp_path, "--grpc", "0.0.0.0:0", *options)
        assert "--grpc 0.0.0.0:0" in message and "--token-file" in message


def test_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"--grpc {address}: " in refused(tmp_path, "--grpc", address)
    assert "--grpc 'nowhere': expected HOST:PORT" in refused(tmp_path, "--grpc", "nowhere")


def test_missing_libraries_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.PARTS, "inference serving", (("no-such-distribution",), "serving"))
    message = refused(tmp_path)
    assert "no-such-distribution, not installed here; pip install 'fedloop[serving]'" in message
