"""A table from end to end: simulated, exported and predicted by name; and trained on devices that know only where it lies."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import local_fleet
from edge_client.commands import cli as edge_cli
from edge_client.wire import schema as schemas
from tests.parity.test_schema import COLUMNS, awkward_rows, write
from tests.support.cli import report_of, run_cli, run_here

pytestmark = pytest.mark.slow

EXPERIMENT = """
[data]
dataset = "csv"
path = "{path}"
label = "outcome"
site = "site"
exclude = ["patient"]

[model]
name = "mlp"
hidden = [8]

[local]
steps = 5

[federation]
rounds = 2
runtimes = {{ litert = 1 }}
"""


def classes(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row["class"] for row in csv.DictReader(file)]


def test_a_table_is_simulated_exported_and_predicted_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path / "all.csv", awkward_rows(), COLUMNS, "utf-8-sig", ";")
    (tmp_path / "e.toml").write_text(EXPERIMENT.format(path=table))
    new = write(
        tmp_path / "new.csv",
        awkward_rows(),
        ["dose", "admitted", "ward", "outcome", "code", "age"],
        "latin-1",
        "|",
    )
    run, release = tmp_path / "run", tmp_path / "release"
    for command in (
        ["simulate", tmp_path / "e.toml", "--out", run],
        ["export", run, "--name", "patients", "--precision", "float32", "--out", release],
    ):
        done = run_cli(*command)
        assert done.returncode == 0, done.stderr
    schema = schemas.from_json((run / "schema.json").read_bytes())
    assert json.loads((release / "manifest.json").read_text("utf-8"))["schema"]["label"] == "outcome"
    assert report_of(run)["data"]["schema"]["scale"] == schema.scale == "federated"

    for model, out in ((run, "run.csv"), (release, "release.csv")):
        done = run_here("predict", model, new, "--encoding", "latin-1", "--out", tmp_path / out)
        assert done.returncode == 0, done.stderr
        assert "on 480 rows whose class is known" in done.stderr
    kept = new.read_bytes()
    done = run_here("predict", run, new, "--encoding", "latin-1", "--out", new)
    assert done.returncode == 2 and "is a table that is read" in done.stderr
    assert new.read_bytes() == kept
    done = run_here("predict", run, new, "--explain-columns", "--out", tmp_path / "columns.csv")
    assert done.returncode == 2 and "--explain-columns predicts nothing" in done.stderr
    state = f"state_dir={tmp_path / 'state'}"
    command = ["fedloop-edge", "--set", state, "predict", str(new), "--release", str(release)]
    options = ["--encoding", "latin-1", "--out", str(tmp_path / "edge.csv")]
    monkeypatch.setattr("sys.argv", [*command, *options])
    with pytest.raises(SystemExit) as ended:
        edge_cli.main()
        raise SystemExit(0)
    assert not ended.value.code, capsys.readouterr().err
    found = [classes(tmp_path / name) for name in ("run.csv", "release.csv", "edge.csv")]
    assert found[0] == found[1] == found[2] and set(found[0]) <= set(schema.classes)


def test_devices_read_their_tables_by_the_runs_schema(tmp_path: Path) -> None:
    """Their configuration says where the table lies, and nothing of its columns."""
    rows = awkward_rows()
    (tmp_path / "held").mkdir()
    table = write(tmp_path / "held" / "all.csv", rows, COLUMNS, "utf-8", ";")
    with local_fleet(tmp_path / "fleet", ["--allow-path", str(tmp_path / "held")]) as fleet:
        for index, site in enumerate(("nord", "ost")):
            own = [row for row in rows if row[COLUMNS.index("site")] == site]
            path = write(tmp_path / f"{index}.csv", own, COLUMNS[:-3] + COLUMNS[-2:], "latin-1", "|")
            options = {"kind": "csv", "path": str(path), "split": "split", "encoding": "latin-1"}
            fleet.add(f"device-{index}", {"data": {"csv": options}}).start()
        (tmp_path / "e.toml").write_text(EXPERIMENT.format(path=table))
        sets = ["federation.clients_per_round=2", "federation.min_updates=2", "devices.patience_seconds=60"]
        done = run_here(
            "run",
            tmp_path / "e.toml",
            *(part for each in sets for part in ("--set", each)),
            "--out",
            tmp_path / "run",
            env={
                "FEDLOOP_COORDINATOR": fleet.operator_url,
                "FEDLOOP_ADMIN_TOKEN": str(read_admin_token(fleet.home)),
            },
        )
        assert done.returncode == 0, done.stderr
    report = report_of(tmp_path / "run")
    assert any("scaled by the means and deviations of 2 devices" in each for each in report["notices"])
    assert [(each["accepted"], each["rejected"]) for each in report["rounds"]] == [(2, 0)] * 2
    assert schemas.from_json((tmp_path / "run" / "schema.json").read_bytes()).label == "outcome"
