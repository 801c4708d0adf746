"""What a run leaves behind: lines that fit the committed rounds, a report of valid JSON, curves one can look at."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloop
from coordinator.commands import summaries
from coordinator.experiments import experiment
from coordinator.fleets.simulated_clients import SimulatedClient
from coordinator.reports import curves, report, run_files
from coordinator.reports.curves import make_figure
from coordinator.reports.figures import Judged, LabelledRows
from coordinator.rounds.events import LineFile
from coordinator.rounds.records import Checkpoint, RoundRecord, as_row
from edge_client.train.evaluation import Evaluation
from edge_client.wire import arrays
from strategies.params import State
from tests.support.federation import PARAMS

RECORD = RoundRecord(
    round=1, selected=10, accepted=8, rejected=1, silent=1, train_loss=0.75, test_loss=0.5, test_accuracy=0.875,
    client_accuracy_min=0.5, client_accuracy_median=0.75, client_accuracy_max=1.0, bytes_up=1000, bytes_down=2000,
    seconds=0.25, rejections={"non_finite": 1},
)  # fmt: skip


def committed(number: int, offsets: dict[str, int]) -> Checkpoint:
    row = as_row(replace(RECORD, round=number))
    return Checkpoint(number, {}, State(), row, offsets, {})


def records(count: int) -> list[RoundRecord]:
    return [replace(RECORD, round=number, seconds=number / 8) for number in range(1, count + 1)]


def close(lines: dict[str, LineFile]) -> None:
    for file in lines.values():
        file.close()


def sizes(lines: dict[str, LineFile]) -> dict[str, int]:
    return {name: file.size_bytes for name, file in lines.items()}


def written(out: Path, count: int) -> dict[str, int]:
    """A run of `count` rounds, with one event each; the sizes when the last was committed."""
    lines = run_files.open_lines(out, None)
    offsets = sizes(lines)
    for record in records(count):
        lines["events.jsonl"].append(json.dumps({"event": "round_started", "round": record.round}))
        offsets = sizes(lines)
        run_files.append_round(lines["rounds.csv"], record)
        lines["events.jsonl"].append(json.dumps({"event": "round_committed", "round": record.round}))
    close(lines)
    return offsets


def events(out: Path) -> list[tuple[str, int]]:
    return [
        (line["event"], line["round"])
        for line in map(json.loads, (out / "events.jsonl").read_text().splitlines())
    ]


counts = st.integers(0, 10**9)
shares = st.floats(0, 1)
losses = st.floats()


@given(
    st.builds(
        RoundRecord, round=counts, selected=counts, accepted=counts, rejected=counts, silent=counts,
        train_loss=st.none() | losses, test_loss=losses, test_accuracy=shares, client_accuracy_min=shares,
        client_accuracy_median=shares, client_accuracy_max=shares, bytes_up=counts, bytes_down=counts,
        seconds=st.floats(0, 1e6), rejections=st.dictionaries(st.text(max_size=9), counts, max_size=3),
    )
)  # fmt: skip
def test_a_line_of_the_table_reads_back_as_the_row(
    tmp_path_factory: pytest.TempPathFactory, record: RoundRecord
) -> None:
    out = tmp_path_factory.mktemp("run")
    lines = run_files.open_lines(out, None)
    run_files.append_round(lines["rounds.csv"], record)
    close(lines)
    assert run_files.read_rounds(out / "rounds.csv") == [as_row(record)]


def test_the_table_is_on_disk_as_each_round_ends(tmp_path: Path) -> None:
    lines = run_files.open_lines(tmp_path, None)
    for number, record in enumerate(records(3), start=1):
        run_files.append_round(lines["rounds.csv"], record)
        assert len(run_files.read_rounds(tmp_path / "rounds.csv")) == number
    close(lines)


def test_losses_that_are_not_finite_become_null(tmp_path: Path) -> None:
    lines = run_files.open_lines(tmp_path, None)
    for loss in (float("nan"), float("inf"), float("-inf")):
        run_files.append_round(lines["rounds.csv"], replace(RECORD, test_loss=loss, train_loss=loss))
    close(lines)
    rows = run_files.read_rounds(tmp_path / "rounds.csv")
    assert [(row["train_loss"], row["test_loss"]) for row in rows] == [(None, None)] * 3


# Resume


def test_lines_after_the_committed_round_are_cut_off(tmp_path: Path) -> None:
    """Killed in round 4, whose events had begun; its commit had not."""
    offsets = written(tmp_path, 3)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "round_started", "round": 4}\n{"event": "upd')
    close(run_files.open_lines(tmp_path, committed(3, offsets)))
    assert [row["seconds"] for row in run_files.read_rounds(tmp_path / "rounds.csv")] == [1 / 8, 2 / 8, 3 / 8]
    assert events(tmp_path) == [
        (name, number) for number in (1, 2, 3) for name in ("round_started", "round_committed")
    ]


@pytest.mark.parametrize("torn", [None, "", "3,10,8,1,1,0.7"], ids=["absent", "empty", "half a line"])
def test_a_run_killed_before_the_line_of_its_round_gets_it_from_the_checkpoint(
    tmp_path: Path, torn: str | None
) -> None:
    offsets = written(tmp_path, 3)
    table = tmp_path / "rounds.csv"
    table.write_bytes(table.read_bytes()[: offsets["rounds.csv"]] + (torn or "").encode())
    saved = committed(3, offsets)
    close(run_files.open_lines(tmp_path, saved))
    rows = run_files.read_rounds(table)
    assert rows[:2] == [as_row(record) for record in records(2)]
    assert rows[2] == saved.record


def test_a_line_written_after_its_commit_is_kept_with_its_own_seconds(tmp_path: Path) -> None:
    offsets = written(tmp_path, 2)
    before = (tmp_path / "rounds.csv").read_bytes()
    close(run_files.open_lines(tmp_path, committed(2, offsets)))
    assert (tmp_path / "rounds.csv").read_bytes() == before


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    offsets = written(tmp_path, 2)
    lines = run_files.open_lines(tmp_path, committed(2, offsets))
    run_files.append_round(lines["rounds.csv"], replace(RECORD, round=3))
    close(lines)
    assert [row["round"] for row in run_files.read_rounds(tmp_path / "rounds.csv")] == [1, 2, 3]


def test_a_new_run_starts_with_empty_files(tmp_path: Path) -> None:
    """Killed before its first commit, it begins again."""
    written(tmp_path, 2)
    close(run_files.open_lines(tmp_path, None))
    assert run_files.read_rounds(tmp_path / "rounds.csv") == []
    assert (tmp_path / "events.jsonl").read_bytes() == b""


# The report


def evaluation(correct: list[int], labels: list[int], loss_sum: float = 2.0) -> Evaluation:
    return Evaluation(loss_sum, np.array(correct, np.int64), np.array(labels, np.int64))


FOUND: dict[str, Any] = {
    "fingerprint": "f", "classes": 3, "input_shape": [4], "task": "classification", "preview": ["rows"],
    "site_names": ["north", "south", "empty"], "class_names": [],
}  # fmt: skip
CLIENTS = [
    SimulatedClient("a", 0, 5, "torch"),
    SimulatedClient("b", 1, 5, "litert"),
    SimulatedClient("c", 2, 5, "torch"),
]


def write(
    out: Path, final: Evaluation, *, sites: Any = None, count: int = 3, **changed: Any
) -> dict[str, Any]:
    lines = run_files.open_lines(out, None)
    lines["events.jsonl"].append('{"event": "run_started", "test_loss": 2.3, "test_accuracy": 0.1}')
    for record in records(count):
        run_files.append_round(lines["rounds.csv"], replace(record, **changed))
    close(lines)
    resolved = experiment.resolve({"name": "trial"}, "test")
    labels = np.zeros(len(final.labels), np.int32)
    judged = Judged(final, LabelledRows(labels, sites), LabelledRows(labels, sites))
    return report.write(out, resolved, FOUND, CLIENTS, PARAMS, count, judged)


def strictly(text: str) -> Any:
    """JSON as the standard has it, without Python's NaN and Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_report_sums_up_the_run(tmp_path: Path) -> None:
    returned = write(tmp_path, evaluation([1, 0, 1, 1], [1, 1, 1, 1]))
    document = strictly((tmp_path / "report.json").read_text())
    assert document == returned
    assert document["final"] == {
        "round": 3,
        "stopped_early": True,
        "test_accuracy": 0.75,
        "test_loss": 0.5,
        "test_rows": 4,
        "model_sha256": arrays.sha256((tmp_path / "model.safetensors").read_bytes()),
        "baselines": {"majority": {"class": "0", "test_accuracy": 1.0}},
    }
    assert document["rounds"] == run_files.read_rounds(tmp_path / "rounds.csv")
    assert (document["clients"], document["runtimes"]) == (3, {"litert": 1, "torch": 2})
    assert (document["bytes_up"], document["bytes_down"]) == (3000, 6000)
    assert document["rejections"] == {"non_finite": 3}
    assert document["experiment"]["name"] == "trial"
    assert "per_site" not in document


def test_the_model_is_left_as_params(tmp_path: Path) -> None:
    write(tmp_path, evaluation([1], [1]))
    left = arrays.decode((tmp_path / "model.safetensors").read_bytes())
    assert {name: value.tobytes() for name, value in left.items()} == {
        name: value.tobytes() for name, value in PARAMS.items()
    }


def test_accuracy_per_site_is_pooled_over_the_rows_of_each(tmp_path: Path) -> None:
    """Rows of sequences count each of their labels; a site without test rows has no accuracy."""
    final = evaluation([3, 0, 1, 2], [4, 2, 1, 3])
    document = write(tmp_path, final, sites=np.array([0, 1, 1, 0], np.int32))
    accuracy = {
        name: {key: site[key] for key in ("test_rows", "test_accuracy")}
        for name, site in document["per_site"].items()
    }
    assert accuracy == {
        "north": {"test_rows": 2, "test_accuracy": 5 / 7},
        "south": {"test_rows": 2, "test_accuracy": 1 / 3},
        "empty": {"test_rows": 0, "test_accuracy": None},
    }


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_model_that_diverged_has_a_report_too(tmp_path: Path, loss: float) -> None:
    final = evaluation([0], [1], loss_sum=loss)
    document = write(tmp_path, final, test_loss=loss, train_loss=loss)
    assert strictly((tmp_path / "report.json").read_text()) == document
    assert document["final"]["test_loss"] is None
    assert "test loss not finite" in summaries.run_summary(document, tmp_path)


UNTESTED = dict.fromkeys(
    ("test_loss", "test_accuracy", "client_accuracy_min", "client_accuracy_median", "client_accuracy_max")
)


@pytest.mark.parametrize(
    ("count", "changed"),
    [
        (1, {}),
        (40, {}),
        (3, {"train_loss": None}),
        (3, {"train_loss": None, "test_loss": float("nan")}),
        (3, UNTESTED),
    ],
    ids=["one round", "many rounds", "no update accepted", "diverged", "not tested"],
)
def test_curves_are_a_picture_of_readable_size(tmp_path: Path, count: int, changed: dict[str, Any]) -> None:
    write(tmp_path, evaluation([1], [1]), count=count, **changed)
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 800 <= width <= 4000
    assert 300 <= height <= 3000
    assert 5_000 < len(picture) < 1_000_000
    assert picture.endswith(b"IEND\xaeB`\x82")


def test_no_spread_is_drawn_where_none_was_measured() -> None:
    """Devices that evaluate every third round give a line at these rounds, and no band between them."""
    _, _, axes = make_figure()
    rows = [as_row(record) | (UNTESTED if record.round % 3 else {}) for record in records(7)]
    curves._draw_accuracy(axes, {"test_accuracy": None}, rows)
    (lines,) = axes.collections
    assert [segment[0][0] for segment in lines.get_segments()] == [3, 6]  # type: ignore[attr-defined]

    _, _, axes = make_figure()
    curves._draw_accuracy(axes, {"test_accuracy": None}, [row | UNTESTED for row in rows])
    assert list(axes.collections) == []


def test_equal_runs_draw_equal_pictures(tmp_path: Path) -> None:
    pictures = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, evaluation([1], [1]))
        pictures.append((tmp_path / name / "curves.png").read_bytes())
    assert pictures[0] == pictures[1]


def test_rounds_that_changed_nothing_are_reported(tmp_path: Path) -> None:
    document = write(tmp_path, evaluation([1], [1]), count=2, accepted=0)
    assert "2 of 2 rounds changed nothing" in summaries.run_summary(document, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "gains"), [(0.2, True), (1e-12, False)], ids=["trained", "hardly trained"])
def test_each_client_fine_tunes_the_final_model_on_its_own_rows(
    tmp_path: Path, lr: float, gains: bool
) -> None:
    document = {
        "data": {"dataset": "digits", "partition": "shards(2)"},
        "model": {"name": "logreg"},
        "federation": {"clients": 6, "clients_per_round": 6, "rounds": 3, "runtimes": {"torch": 1}},
        "local": {"epochs": 1, "lr": 0.1},
        "simulation": {
            "workers": 2,
            "fine_tune": {"epochs": 3, "lr": lr},
            "names": [f"site {n}" for n in range(6)],
        },
    }
    report = fedloop.simulate(document, out=tmp_path / "run").report
    final, clients = report["final"], report["per_client"]
    assert [*clients] == [f"site {n}" for n in range(6)]
    rows = sum(each["test_rows"] for each in clients.values())
    assert rows == final["test_rows"]
    for key, total in (("test_accuracy", "test_accuracy"), ("fine_tuned_accuracy", "fine_tuned_accuracy")):
        mean = sum(each[key] * each["test_rows"] for each in clients.values()) / rows
        assert mean == pytest.approx(final[total])
    if gains:  # each client has two classes or so, and learns to expect only these
        assert final["fine_tuned_accuracy"] > final["test_accuracy"] + 0.05
    else:
        assert all(each["fine_tuned_accuracy"] == each["test_accuracy"] for each in clients.values())
