"""Federated statistics over four daemons: equal to those of the pooled rows, without small counts, on each device's ledger."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
from sklearn import metrics
from sklearn.calibration import calibration_curve

from coordinator.accounts.admin_token import read_admin_token
from coordinator.demos.local_fleet import LocalFleet, local_fleet
from edge_client.wire import schema as schemas
from tests.support.cli import assert_refused, run_here
from tests.support.long import LONG
from tests.support.row_search import values_in
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

SITES = {"north": 300, "south": 220, "east": 160, "west": 60}
FORBIDDEN = "shy"
SCORED = ("north", "south", "east")
"""At the others a class has fewer held-out rows than the minimum count."""


def write(folder: Path) -> dict[str, list[dict[str, str]]]:
    """A table for each site, with one row of a ward, and one age in months, that no other row has."""
    rng = np.random.default_rng(11)
    tables = {}
    for index, (site, count) in enumerate({**SITES, FORBIDDEN: 50}.items()):
        died = rng.integers(2, size=count)
        rows = [
            {
                "age": f"{rng.normal(480 + 60 * index + 72 * died[number], 72):.4f}"
                if number
                else f"{5900 + index}.125",
                "ward": ["icu", "er"][rng.integers(2)] if number else f"only-in-{site}",
                "split": "test" if number % 5 == 4 else "train",
                "outcome": ["home", "died"][died[number]],
            }
            for number in range(count)
        ]
        write_rows(folder / f"{site}.csv", rows)
        tables[site] = rows
    return tables


def start(fleet: LocalFleet, folder: Path, site: str) -> None:
    config: dict[str, Any] = {
        "labels": {"site": site},
        "data": {
            "patients": {
                "kind": "csv",
                "path": str(folder / f"{site}.csv"),
                "split": "split",
                **({"label": "outcome"} if site == "north" else {}),
            }
        },
        "statistics": {"allowed": site != FORBIDDEN},
        "releases": {"trial_seconds": 1},
    }
    fleet.add(site, config).start()


def edge(fleet: LocalFleet, site: str, *command: str) -> str:
    """What `fedloop-edge` prints on a device."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "fedloop-edge"), *command],
        env={**dict(fleet.devices[site].environment), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ledger(fleet: LocalFleet, site: str, *more: str) -> Any:
    return json.loads(edge(fleet, site, "ledger", "--json", *more))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.long
@pytest.mark.parametrize("release", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_statistics_of_four_daemons_are_those_of_their_pooled_rows(tmp_path: Path, release: bool) -> None:
    tables = write(tmp_path)
    with local_fleet(tmp_path / "fleet") as fleet:
        for site in tables:
            start(fleet, tmp_path, site)
        sets = [
            "data.dataset=patients",
            "data.label=outcome",
            "devices.patience_seconds=600",
            "devices.evaluate_seconds=600",
        ]
        wait_for_devices(fleet, len(tables))
        done = run_here(
            "statistics",
            "--fleet",
            "--json",
            "--schema-out",
            str(tmp_path / "schema.json"),
            *(part for each in sets for part in ("--set", each)),
            env=operator(fleet),
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        (told := tmp_path / "told").mkdir()
        (told / "statistics.json").write_text(done.stdout)

        trained = [row for site in SITES for row in tables[site] if row["split"] == "train"]
        ages = np.array([float(row["age"]) for row in trained])
        age = report["pooled"]["columns"]["age"]
        assert age["count"] == len(ages)
        assert age["mean"] == pytest.approx(ages.mean(), rel=1e-9)
        assert age["deviation"] == pytest.approx(ages.std(), rel=1e-9)
        assert set(report["sites"]) == set(SITES)
        assert "does not let it report" in report["silent"][FORBIDDEN]
        assert report["sites"]["north"]["columns"]["age"]["drift"] is not None

        for site in SITES if LONG else ("north", "west"):
            entries = ledger(fleet, site)
            assert [(each["kind"], each["outcome"]) for each in entries] == [("statistics", "delivered")] * 2
            assert "below 10 withheld" in entries[0]["treated"]
            reported = json.dumps([ledger(fleet, site, "--show", str(each["id"])) for each in entries])
            assert '"mean"' in reported
            (told / f"ledger-{site}.json").write_text(reported)
        assert ledger(fleet, FORBIDDEN) == []
        classes = train_and_predict(fleet, tmp_path, age["mean"])
        compare_metrics(tmp_path, tables)
        if release:
            release_and_predict(fleet, tmp_path, tables, classes)
        look_for_rows(tmp_path, tables)


def train_and_predict(fleet: LocalFleet, folder: Path, mean: float) -> list[str]:
    """Sites train by the schema that four of them made; the model predicts a table in its natural form."""
    schema = schemas.from_json((folder / "schema.json").read_bytes())
    assert [(column.name, column.categories, column.other) for column in schema.columns] == [
        ("age", (), False),
        ("ward", ("er", "icu"), True),
    ]
    assert (schema.classes, schema.label, schema.ignored) == (("died", "home"), "outcome", ("site", "split"))
    assert schema.columns[0].mean == mean
    (folder / "my.toml").write_text(
        """
        data = { dataset = "patients", schema = "schema.json" }
        model = { name = "logreg", register = "triage" }
        federation = { rounds = 1, clients_per_round = 2, runtimes = { torch = 1 }, keep = "best", metric = "auc" }
        devices = { evaluate_every = 1, evaluate_seconds = 600 }
        """
    )
    done = run_here("run", str(folder / "my.toml"), "--out", str(folder / "run"), env=operator(fleet))
    assert done.returncode == 0, done.stderr
    assert "Connection pool" not in done.stderr
    report = json.loads((folder / "run" / "report.json").read_text())
    assert report["rounds"][0]["accepted"] == 2
    assert schemas.from_json((folder / "run" / "schema.json").read_bytes()) == schema

    (folder / "new.csv").write_text("ward,age\nicu,492\nnever seen,\n")
    classes = predicted_classes(folder / "run", folder / "new.csv")
    assert len(classes) == 2 and set(classes) <= set(schema.classes)
    return classes


def release_and_predict(
    fleet: LocalFleet, folder: Path, tables: Mapping[str, list[dict[str, str]]], expected: list[str]
) -> None:
    """The run, whose rows the coordinator never had, is exported as integers with a table that is read by its schema, signed and
    rolled out; a device predicts with it."""
    export = ("export", str(folder / "run"), "--name", "triage", "--out", str(folder / "release"))
    refused = run_here(*export)
    assert_refused(refused, "only devices hold the rows", "--data")
    write_rows(folder / "typical.csv", [row for site in SITES for row in tables[site][1:]])
    done = run_here(*export, "--data", str(folder / "typical.csv"))
    assert done.returncode == 0, done.stderr
    assert "triage:1, static-int8, " in done.stdout
    manifest = json.loads((folder / "release" / "manifest.json").read_text())
    assert manifest["schema"] == json.loads((folder / "run" / "schema.json").read_text())
    assert predicted_classes(folder / "release", folder / "new.csv") == expected

    secret = {**operator(fleet), "FEDLOOP_RELEASE_PASSPHRASE": "correct horse"}
    staging = ("--staging", "stick")
    keys = run_here("release", "online-keys", cwd=folder, env=secret)
    (folder / "online.json").write_text(keys.stdout)
    for command in (
        ("keygen", "keys"),
        ("init", "--keys", "keys", "--online", "online.json", *staging),
        ("add", "release", *staging),
        ("sign", "--keys", "keys", *staging),
        ("publish", *staging),
    ):
        done = run_here("release", *command, cwd=folder, env=secret)
        assert done.returncode == 0, done.stderr
    done = run_here("rollout", "start", "triage:1", "--phases", "100", env=operator(fleet))
    assert done.returncode == 0, done.stderr
    while (rollout := fleet.client.get("/rollouts", limit=1)[0])["state"] != "finished":
        assert rollout["state"] not in ("failed", "aborted", "rolled_back"), rollout
        for _ in fleet.client.events("/events"):
            break
    predictions = json.loads(edge(fleet, "north", "predict", str(folder / "new.csv"), "--json"))
    assert [row["class_name"] for row in predictions["predictions"]] == expected


def predicted_classes(model: Path, rows: Path) -> list[str]:
    done = run_here("predict", str(model), str(rows), "--json")
    assert done.returncode == 0, done.stderr
    return [row["class_name"] for row in json.loads(done.stdout)["predictions"]]


def compare_metrics(folder: Path, tables: Mapping[str, list[dict[str, str]]]) -> None:
    """What devices report of their held-out rows are scikit-learn's figures of these rows, pooled and predicted in one place."""
    held_out = {site: [row for row in tables[site] if row["split"] == "test"] for site in tables}
    pooled = [row for site in SCORED for row in held_out[site]]
    write_rows(folder / "pooled.csv", pooled)
    done = run_here("predict", folder / "run", folder / "pooled.csv", "--json")
    assert done.returncode == 0, done.stderr
    p = np.array([row["probabilities"]["home"] for row in json.loads(done.stdout)["predictions"]])
    y = np.array([row["outcome"] == "home" for row in pooled], int)
    cap = int(median_low(map(len, held_out.values())))
    weights = np.concatenate(
        [np.full(len(held_out[site]), min(1.0, cap / len(held_out[site]))) for site in SCORED]
    )

    report = json.loads((folder / "run" / "report.json").read_text())
    (scored,), got = report["rounds"], report["final"]["metrics"]
    assert (scored["on_devices"]["devices"], got["devices"], got["rows"]) == (len(tables), 3, len(y))
    assert scored["on_devices"]["label_cap"] == cap
    assert scored["test_metric"] == got["auc"] > 0.6
    exact = metrics.roc_auc_score(y, p, sample_weight=weights)
    assert abs(got["auc"] - exact) <= got["auc_error"] + 1e-3
    assert got["confusion"] == metrics.confusion_matrix(y, p > 0.5).tolist()
    assert got["brier"] == pytest.approx(metrics.brier_score_loss(y, p, sample_weight=weights), rel=1e-4)
    assert {name for name, site in report["per_site"].items() if "metrics" in site} == set(SCORED)
    start = 0
    for site in SCORED:
        of_site = slice(start, start := start + len(held_out[site]))
        figures = report["per_site"][site]["metrics"]
        assert figures["confusion"] == metrics.confusion_matrix(y[of_site], p[of_site] > 0.5).tolist()
        observed, predicted = calibration_curve(y[of_site], p[of_site], n_bins=10)
        bins = figures["calibration"]
        assert [each["observed"] for each in bins] == pytest.approx(observed.tolist())
        assert [each["predicted"] for each in bins] == pytest.approx(predicted.tolist(), rel=1e-4)


def look_for_rows(folder: Path, tables: Mapping[str, list[dict[str, str]]]) -> None:
    """No age of a row is in what the devices told, or in what became of it; no rare text or extreme is anywhere in the fleet."""
    told = folder / "told"
    made = ("schema.json", "run/schema.json", "run/report.json", "run/events.jsonl", "release/manifest.json")
    for path in filter(Path.is_file, (folder / name for name in made)):
        (told / f"{path.parent.name}-{path.name}").write_bytes(path.read_bytes())
    rare = [f"only-in-{site}" for site in tables]
    extremes = [rows[0]["age"] for rows in tables.values()]
    ages = [float(row["age"]) for rows in tables.values() for row in rows]
    assert values_in(told, rare, ages) == []
    for published in ("fleet", "run", "release", "stick"):
        assert values_in(folder / published, [*rare, *extremes], []) == []
    statistics = json.loads((told / "statistics.json").read_text())
    for reported in (statistics["pooled"], *statistics["sites"].values()):
        counts = [
            *reported["labels"]["classes"].values(),
            *reported["columns"]["ward"]["categories"].values(),
        ]
        assert min([*counts, *filter(None, reported["columns"]["age"]["histogram"])]) >= 10

    (told / "planted.json").write_text(json.dumps({"age": {"low": ages[17]}}))
    assert values_in(told, rare, ages) == ["planted.json: number in text"]
    assert len(values_in(folder, rare, [])) == len(tables)


def operator(fleet: LocalFleet) -> dict[str, str]:
    return {
        "FEDLOOP_COORDINATOR": fleet.operator_url,
        "FEDLOOP_ADMIN_TOKEN": str(read_admin_token(fleet.home)),
    }


def wait_for_devices(fleet: LocalFleet, count: int) -> None:
    """Until that many have checked in with rows."""

    def with_rows() -> int:
        """A slow device's first check-in may come before it has counted its rows."""
        devices = fleet.client.get("/devices", limit=100)["devices"]
        return sum(any(each["report"].get("datasets", {}).values()) for each in devices)

    wait_until(lambda: with_rows() >= count)
