"""The tables `[uplink]` and `[downlink]`: what they accept and refuse, and runs with codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloop
from coordinator.errors import UserError
from coordinator.experiments import codes, experiment
from coordinator.experiments.sections import Downlink, Uplink
from coordinator.on_flower.possible import require_possible
from coordinator.reports.run_files import read_rounds
from strategies import presets
from strategies.codes import known
from tests.support.cli import report_of, run_cli, simulate
from tests.support.long import extended


def load(*sets: str) -> Uplink:
    return experiment.load(None, sets).uplink


def load_downlink(*sets: str) -> Downlink:
    return experiment.load(None, sets).downlink


def refused(*sets: str) -> str:
    with pytest.raises(UserError) as caught:
        experiment.load(None, sets)
    return str(caught.value)


def test_without_a_code_updates_are_sent_as_they_are() -> None:
    assert load().options == {} and codes.make_code(load()) is None


@pytest.mark.parametrize("name", known.CODES)
def test_each_code_can_be_chosen_and_its_defaults_are_written_down(name: str) -> None:
    chosen = load(f"uplink.code={name}")
    assert codes.make_code(chosen) == known.get(name)
    assert chosen.options == {key: option.default for key, option in known.OPTIONS[name].items()}


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["uplink.code=gzip"], "uplink.code = 'gzip'"),
        (["uplink.bits=8"], "uplink.bits = 8 is an option of a code; set uplink.code too, or leave it out"),
        (["uplink.code=sign", "uplink.bits=8"], "uplink.bits: sign has no option 'bits'"),
        (["uplink.code=qsgd", "uplink.bits=3"], "uplink.bits: bits = 3 is not allowed for qsgd: expected one of 2, 4, 8"),
        (["uplink.code=topk", "uplink.share=0"], "uplink.share = 0"),
        (["uplink.code=topk", "uplink.sahre=0.1"], "uplink.sahre is not a known key, did you mean 'share'?"),
        (["uplink.code=qsgd", "strategy.name=scaffold"], "uplink.code = 'qsgd' does not go with strategy.name = 'scaffold'"),
        (["uplink.code=qsgd", "strategy.name=feddyn"], "take a strategy whose clients remember nothing"),
        (["uplink.code=qsgd", "strategy.name=qfedavg"], "its clients send a loss beside the update"),
        (["uplink.code=qsgd", "strategy.name=ditto"], "its clients keep a part of what they learn"),
        (["uplink.code=topk", "strategy.name=median"], "take qsgd with bits = 8 or eden with bits = 4"),
        (["uplink.code=qsgd", "uplink.bits=2", "strategy.name=krum"], "this code keeps too little of each"),
        (["uplink.code=sign", "strategy.clip_norm=1"], "what strategy.clip_norm cuts off"),
        (["uplink.code=sign", "federation.mode=async"], "in asynchronous runs (federation.mode = 'async') clients keep nothing"),
        (["uplink.code=topk", "strategy.name=fedbuff"], "clients keep nothing"),
        (["uplink.code=topk", "federation.rounds=1"], "with federation.rounds = 1 a client takes part about once"),
        (["uplink.code=topk", "federation.rounds=2"], "a client takes part about once"),
        (["uplink.code=drive", "simulation.faults={nan=1}"], "simulation.faults: nan is a fault of tensors"),
        (["uplink.code=drive", 'simulation.attack={name="ipm", clients=2}'], "it would send what the code cannot"),
        (["uplink.code=drive", 'simulation.attack={name="backdoor", clients=2, scale=5.0}'], "simulation.attack.scale = 5.0"),
    ],
)  # fmt: skip
def test_what_a_code_does_not_go_with_is_refused_with_the_reason(sets: list[str], words: str) -> None:
    assert words in refused(*sets)


def test_all_problems_of_a_code_are_reported_at_once() -> None:
    message = refused(
        "uplink.code=topk", "uplink.rank=3", "strategy.name=scaffold", "simulation.faults={nan=1}"
    )
    for words in ("uplink.rank", "strategy.name = 'scaffold'", "simulation.faults"):
        assert words in message


@pytest.mark.parametrize(
    "sets",
    [
        ["uplink.code=qsgd", "federation.mode=async"],
        ["uplink.code=eden", "strategy.name=fedbuff"],
        ["uplink.code=qsgd", "strategy.name=median"],
        ["uplink.code=sign", "strategy.name=fedsgd"],
        ["uplink.code=eden", "strategy.name=multi_krum"],
        ["uplink.code=drive", "strategy.clip_norm=1"],
        ["uplink.code=drive", "federation.rounds=1"],
        ["uplink.code=topk", "strategy.name=fedprox"],
        ["uplink.code=sign", "strategy.name=fednova"],
        ["uplink.code=sign", "simulation.faults={stale_base=1, duplicate=1, no_examples=1}"],
        ["uplink.code=powersgd", 'simulation.attack={name="label_flip", clients=2}'],
    ],
)
def test_what_a_code_goes_with_is_accepted(sets: list[str]) -> None:
    assert load(*sets).code is not None


def test_a_strategy_of_ones_own_is_checked_by_its_base() -> None:
    chosen = experiment.load(None, ["uplink.code=qsgd", "downlink.code=drive"])
    problems = [*codes.strategy_problems(chosen, presets.get("scaffold"))]
    assert len(problems) == 2 and all("does not go with" in each for each in problems)
    assert not [*codes.strategy_problems(chosen, presets.get("fedavg"))]


# -- the downlink --


def test_without_a_code_each_client_gets_the_model() -> None:
    assert load_downlink().options == {} and codes.make_code(load_downlink()) is None


@pytest.mark.parametrize("name", known.CODES)
def test_each_code_can_write_the_changes_of_the_model(name: str) -> None:
    chosen = load_downlink(f"downlink.code={name}")
    assert codes.make_code(chosen) == known.get(name)
    assert chosen.options == {key: option.default for key, option in known.OPTIONS[name].items()}


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["downlink.code=gzip"], "downlink.code = 'gzip'"),
        (["downlink.bits=8"], "downlink.bits = 8 is an option of a code; set downlink.code too, or leave it out"),
        (["downlink.code=sign", "downlink.bits=8"], "downlink.bits: sign has no option 'bits'"),
        (["downlink.code=qsgd", "downlink.bits=2"], "an error that may be larger than what it writes"),
        (["downlink.code=drive", "downlink.share=0.1"], "take a share of 0.2 or more, or topk"),
        (["downlink.code=drive", "strategy.name=scaffold"], "downlink.code = 'drive' does not go with strategy.name = 'scaffold'"),
        (["downlink.code=drive", "strategy.name=feddyn"], "take a strategy whose clients remember nothing"),
        (["downlink.code=drive", "strategy.name=qfedavg"], "its clients measure the loss of the server's model"),
        (["downlink.code=drive", "strategy.name=fltrust"], "theirs start from another model"),
        (["downlink.code=drive", "strategy.name=fedper"], "its clients keep a part of the model"),
        (["downlink.code=drive", "federation.mode=async"], "clients start from many versions"),
        (["downlink.code=drive", "strategy.name=fedbuff"], "clients start from many versions"),
        (["downlink.code=drive", "federation.rounds=1"], "takes part about once and gets all of it"),
        (["downlink.code=drive", "federation.rounds=2"], "takes part about once and gets all of it"),
    ],
)  # fmt: skip
def test_what_a_code_on_the_downlink_does_not_go_with_is_refused(sets: list[str], words: str) -> None:
    assert words in refused(*sets)


@pytest.mark.parametrize(
    "sets",
    [
        ["uplink.code=topk"],
        ["strategy.name=fedadam"],
        ["strategy.name=fednova"],
        ["strategy.name=median"],
        ["federation.relays=2"],
        ['simulation.attack={name="sign_flip", clients=2}'],
        ["simulation.faults={nan=1, stale_base=1}"],
    ],
)
def test_what_a_code_on_the_downlink_goes_with_is_accepted(sets: list[str]) -> None:
    assert load_downlink("downlink.code=drive", *sets).code == "drive"


def test_devices_get_the_whole_model() -> None:
    with pytest.raises(
        UserError, match=r"downlink\.code = 'drive' is for simulations: a device fetches the whole model"
    ):
        experiment.resolve({"downlink": {"code": "drive"}}, "experiment", "devices")


def test_flower_sends_the_whole_model() -> None:
    with pytest.raises(UserError, match=r"downlink\.code = 'drive': Flower's nodes get the model as it is"):
        require_possible(experiment.load(None, ["downlink.code=drive"]))


def test_flower_refuses_a_code() -> None:
    with pytest.raises(
        UserError, match=r"uplink\.code = 'drive': Flower's nodes send their updates as they are"
    ):
        require_possible(experiment.load(None, ["uplink.code=drive"]))


# -- runs --

RUN: dict[str, Any] = {
    "data": {"dataset": "synthetic(shape=[12], classes=3, samples=120)", "partition": "iid"},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 6, "clients_per_round": 4, "rounds": 4, "runtimes": {"torch": 1}},
    "local": {"epochs": 1},
    "simulation": {"local_baseline": "off", "workers": 1},
}


def run(out: Path, **changed: Any) -> dict[str, Any]:
    document = {**RUN, **{key: {**RUN.get(key, {}), **value} for key, value in changed.items()}}
    report: dict[str, Any] = fedloop.simulate(document, out=out).report
    return report


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pool", "stacked"])
def test_a_run_counts_encoded_bytes_and_ends_in_the_same_bits_with_two_workers(
    tmp_path: Path, engine: str
) -> None:
    code = {"code": "topk", "share": 0.05, "bits": 8}
    first = run(tmp_path / "a", uplink=code, simulation={"engine": engine})
    second = run(tmp_path / "b", uplink=code, simulation={"engine": engine, "workers": 2})
    assert first["final"]["model_sha256"] == second["final"]["model_sha256"]
    values = 12 * 16 + 16 + 16 * 3 + 3
    rows = read_rounds(tmp_path / "a" / "rounds.csv")
    assert [row["bytes_up_uncompressed"] for row in rows] == [4 * 4 * values] * 4
    total = sum(row["bytes_up"] for row in rows)
    assert first["uplink"] == {
        "bytes": total,
        "uncompressed_bytes": 4 * 4 * 4 * values,
        "times_fewer": round(4 * 4 * 4 * values / total, 2),
    }
    assert all(row["accepted"] == 4 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("code", [{"code": "drive"}, *extended({"code": "qsgd"})])
def test_an_asynchronous_run_takes_a_code_that_keeps_nothing(tmp_path: Path, code: dict[str, Any]) -> None:
    report = run(tmp_path / "a", uplink=code, federation={"mode": "async", "buffer": 2})
    assert [row["accepted"] for row in report["rounds"]] == [2] * 4
    assert report["bytes_up"] == report["uplink"]["bytes"]


@pytest.mark.extended
@pytest.mark.slow
def test_what_clients_keep_survives_a_resume(tmp_path: Path) -> None:
    short = run(tmp_path / "a", uplink={"code": "sign"})
    whole = run(tmp_path / "b", uplink={"code": "sign"}, federation={"rounds": 6})
    done = run_cli("simulate", "--resume", tmp_path / "a", "--set", "federation.rounds=6")
    assert done.returncode == 0, done.stderr
    assert "times fewer than uncompressed" in done.stdout
    resumed = report_of(tmp_path / "a")["final"]["model_sha256"]
    assert resumed == whole["final"]["model_sha256"] != short["final"]["model_sha256"]


@pytest.mark.slow
@pytest.mark.extended
def test_all_runtimes_train_with_error_feedback(tmp_path: Path) -> None:
    report = simulate(
        tmp_path / "run",
        [
            "model.name=mlp",
            "federation.clients=6",
            "federation.clients_per_round=6",
            "federation.rounds=2",
            "federation.runtimes={litert=1, torch=1, tensorflow=1}",
            "uplink.code=powersgd",
            "simulation.local_baseline=off",
        ],
    )
    assert report["runtimes"] == {"litert": 2, "tensorflow": 2, "torch": 2}
    assert [row["accepted"] for row in report["rounds"]] == [6, 6]


DELTAS = {"code": "eden", "bits": 4}


@pytest.mark.slow
def test_a_code_on_the_downlink_saves_bytes_and_resumes_in_the_same_bits(tmp_path: Path) -> None:
    whole = run(
        tmp_path / "whole", downlink=DELTAS, uplink={"code": "topk", "share": 0.05}, federation={"rounds": 6}
    )
    rows = read_rounds(tmp_path / "whole" / "rounds.csv")
    model = rows[0]["bytes_down"] // 4  # the first round sends it as it is
    assert [row["bytes_down_uncompressed"] for row in rows] == [4 * model] * 6
    assert all(row["accepted"] == 4 and row["bytes_down"] < 4 * model for row in rows[1:])
    total = sum(row["bytes_down"] for row in rows)
    saved = {"bytes": total, "uncompressed_bytes": 24 * model, "times_fewer": round(24 * model / total, 2)}
    assert whole["downlink"] == saved

    run(tmp_path / "part", downlink=DELTAS, uplink={"code": "topk", "share": 0.05}, simulation={"workers": 2})
    done = run_cli("simulate", "--resume", tmp_path / "part", "--set", "federation.rounds=6")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("times fewer than uncompressed") == 2
    resumed = report_of(tmp_path / "part")
    assert resumed["final"]["model_sha256"] == whole["final"]["model_sha256"]
    assert resumed["downlink"] == saved
