"""`fedloop serving profile|tune|bench` as real commands, and the tables that a server chooses backends by."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.serving.deployments import DeploymentSection
from coordinator.serving.measuring.benchmark import Plan, poisson_arrivals, summarize
from coordinator.serving.measuring.load import Load
from coordinator.serving.measuring.tables import (
    BackendProfile,
    ProfileTable,
    backend_for,
    profile_path,
    read_table,
    write_table,
)
from coordinator.serving.measuring.tuning import Trial, best, combinations
from tests.support.cli import assert_refused, run_cli, run_here
from tests.support.released import release_folder
from tests.support.serving import Server, serving, torch_model

pytestmark = pytest.mark.slow

IDENTITY = "ab" * 32
MODEL = {"release": False, "description": {"name": "resnet8", "input_shape": [28, 28]}}
SECTION = DeploymentSection(model="digits:1", slo_ms=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home") as running:
        running.deployed("digits", torch_model(folder / "mlp"))
        yield running


def table(section: DeploymentSection = SECTION) -> ProfileTable:
    """By which channels_last is fastest within 10 ms, and compiled beyond."""
    return ProfileTable.of(
        IDENTITY,
        section,
        {
            "torch": BackendProfile(seconds={"1": 0.002, "16": 0.009}),
            "channels_last": BackendProfile(seconds={"1": 0.003, "16": 0.008}),
            "compiled": BackendProfile(seconds={"1": 0.001, "16": 0.011}),
            "packed": BackendProfile(seconds={"1": 1e-6}, problem="failed at 16 rows"),
        },
    )


def test_the_best_backend_has_most_rows_a_second_within_the_time_limit(tmp_path: Path) -> None:
    assert table().best == "channels_last"
    assert table(SECTION.model_copy(update={"slo_ms": 20.0})).best == "channels_last"
    assert table(SECTION.model_copy(update={"slo_ms": 1.0})).best == "compiled"
    assert table(SECTION.model_copy(update={"slo_ms": 0.5})).best == ""


def test_a_table_chooses_the_backend_unless_the_deployment_does(tmp_path: Path) -> None:
    assert backend_for(tmp_path, MODEL, IDENTITY, SECTION) == "torch"
    write_table(tmp_path, table())
    assert backend_for(tmp_path, MODEL, IDENTITY, SECTION) == "channels_last"
    named = SECTION.model_copy(update={"backend": "compiled"})
    assert backend_for(tmp_path, MODEL, IDENTITY, named) == "compiled"
    for other in (SECTION.with_workers(None, None, 2), SECTION.model_copy(update={"dtype": "bfloat16"})):
        assert backend_for(tmp_path, MODEL, IDENTITY, other) == "torch"
    flat = {"release": False, "description": {"name": "mlp", "input_shape": [64]}}  # has no such backend
    assert backend_for(tmp_path, flat, IDENTITY, SECTION) == "torch"


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {"processor": "another"}},
        {"identity": "cd" * 32},
        {"best": "gpu"},
        {"backends": 3},
        {"more": True},
    ],
)
def test_a_stale_or_damaged_table_is_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    path = write_table(tmp_path, table())
    assert path == profile_path(tmp_path, IDENTITY, 1, "cpu", "float32")
    assert read_table(tmp_path, IDENTITY, SECTION) == table()
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_table(tmp_path, IDENTITY, SECTION) is None
    path.write_bytes(path.read_bytes()[:40])
    assert read_table(tmp_path, IDENTITY, SECTION) is None


def test_combinations_fit_on_the_cores() -> None:
    assert combinations(1) == [(1, [1])]
    assert combinations(2) == [(1, [1, 2]), (2, [1])]
    for cores in range(1, 70):
        tried = [(workers, threads) for threads, counts in combinations(cores) for workers in counts]
        assert len(set(tried)) == len(tried)
        assert all(workers * threads <= cores for workers, threads in tried)
        assert {(cores, 1), (1, cores)} <= set(tried)


def test_the_best_combination_is_in_time_and_takes_least_memory() -> None:
    def trial(workers: int, rate: float, latency: float, memory: int) -> Trial:
        return Trial(workers, 1, "torch", 8, rate, latency, memory)

    trials = [trial(1, 970, 5, 100), trial(2, 1000, 6, 200), trial(4, 3000, 60, 400)]
    assert best(trials, 10) == trials[0]
    assert best(trials, 100) == trials[2]
    assert best(trials, 1) is None


def test_arrivals_follow_the_rate_and_the_seed() -> None:
    times = poisson_arrivals(1000, 10, 0)
    assert times == sorted(times) == poisson_arrivals(1000, 10, 0) != poisson_arrivals(1000, 10, 1)
    assert abs(len(times) - 10_000) < 5 * 100  # five standard deviations
    assert times[0] >= 0
    assert times[-1] <= 10


def test_failures_are_counted_by_their_code() -> None:
    load = Load(wall=2.0)
    for milliseconds in range(1, 101):
        load.count(200, b"{}", milliseconds / 1000)
    load.count(429, b'{"error": "x", "code": "queue_full"}', 0.1)
    load.count(502, b"<html>", 0.1)
    load.count(0, b"", 0.1)
    found = summarize(load, Plan("digits", rows=4), 1.0, 0.5)
    assert found["failures"] == {"connection lost": 1, "queue_full": 1, "status 502": 1}
    assert (found["requests"], found["answered"], load.failed) == (103, 100, 3)
    assert (found["requests_a_second"], found["rows_a_second"]) == (50.0, 200.0)
    assert 50 <= found["p50_ms"] <= 51 and found["p99_ms"] > 99


def test_profile_stores_what_the_next_deploy_takes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    release = release_folder(tmp_path / "release", 1)
    arguments = ("serving", "profile", release, "--home", home, "--threads", "2,1", "--max-batch", "6")
    done = run_cli(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)["profiles"]
    assert (first["threads"], second["threads"], first["best"]) == (1, 2, "litert")
    assert list(first["backends"]["litert"]["seconds"]) == ["1", "2", "4", "6"]
    assert first["backends"]["litert"]["memory_bytes"] > 2**20
    assert len(list((home / "profiles").iterdir())) == 2
    assert home.stat().st_mode & 0o077 == 0


@pytest.mark.extended
@pytest.mark.slow
def test_profile_measures_every_backend_of_a_torch_model(tmp_path: Path, server: Server) -> None:
    model = torch_model(tmp_path / "r", "resnet8", input_shape=[28, 28])
    done = run_cli("serving", "profile", model, "--home", server.home, "--max-batch", "4")
    assert done.returncode == 0, done.stderr
    for backend in ("torch", "channels_last", "compiled"):
        assert f"{backend}: ms" in done.stdout
    chosen = done.stdout.partition('backend = "auto" is ')[2].split()[0]
    assert server.deployed("profiled", model)["backend"] == chosen


def test_tune_prints_the_line_for_the_deployment(tmp_path: Path) -> None:
    release = release_folder(tmp_path / "release", 1)
    home = tmp_path / "home"
    done = run_cli("serving", "tune", release, "--home", home, "--seconds", "0.1", "--max-batch", "8")
    assert done.returncode == 0, done.stderr
    table, _, line = done.stdout.strip().rpartition("\n")
    assert "litert" in table and "p95 ms" in table
    DeploymentSection.model_validate({"model": "digits:1", **tomllib.loads(line)})


def test_bench_counts_what_a_server_answers(server: Server) -> None:
    for more in ((), ("--binary", "--rows", "3"), ("--rate", "200")):
        done = run_cli(
            "serving", "bench", "digits", "--home", server.home, "--seconds", "0.5", "--json", *more
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["failures"] == {}
        assert found["answered"] == found["requests"] > 10
        assert 0 < found["p50_ms"] <= found["p95_ms"] <= found["p99_ms"]
        assert found["server_cpu_seconds"] > 0
    refused = run_cli(
        "serving", "bench", "digits", "--home", server.home, "--seconds", "0.2", "--rows", "5000"
    )
    assert refused.returncode == 0, refused.stderr
    assert "failed: too_many_rows" in refused.stdout


def test_bench_sends_the_token_of_the_server(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret-" * 5)
    home = tmp_path / "home"
    with serving(home, "--token-file", str(token)) as server:
        server.deployed("digits", release_folder(tmp_path / "release", 1))
        arguments = ("serving", "bench", "digits", "--home", home, "--seconds", "0.2")
        assert_refused(run_cli(*arguments), "--token-file FILE")
        done = run_cli(*arguments, "--token-file", token)
        assert done.returncode == 0, done.stderr
        assert "failed: none" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("profile", "nowhere"), "nowhere"),
        (("profile", "nowhere", "--threads", "1,x"), "--threads '1,x': expected an integer from 1 to 256"),
        (("profile", "nowhere", "--max-batch", "0"), "--max-batch"),
        (("profile", "nowhere", "--dtype", "int3"), "dtype"),
        (("tune", "nowhere", "--backend", "gpu"), "backend"),
        (("tune", "nowhere", "--slo-ms", "0"), "--slo-ms"),
        (("tune", "nowhere", "--seconds", "0"), "--seconds"),
        (("bench", "digits"), "no server has been started here"),
        (("bench", "digits", "--rate", "-1"), "--rate"),
        (("bench", "digits", "--connections", "0"), "--connections"),
    ],
)
def test_bad_values_are_refused(tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    assert_refused(run_here("serving", *arguments, "--home", tmp_path / "home"), expected)


def test_bench_names_what_is_deployed(server: Server) -> None:
    assert_refused(run_here("serving", "bench", "letters", "--home", server.home), "'letters'", "digits")
