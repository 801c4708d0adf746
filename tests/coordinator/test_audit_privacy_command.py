"""`fedloop audit-privacy` on a table, as a user runs it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import assert_refused, options, run_cli, run_here

PATIENTS = """
[data]
dataset = "csv"
path = "patients.csv"
label = "died"
site = "hospital"
partition = "natural"
units = { age = "years" }
[model]
name = "logreg"
[federation]
rounds = 2
runtimes = { torch = 1 }
[privacy]
mechanism = "central"
clip_norm = 0.5
noise_multiplier = 1.0
"""


def write_patients(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = ["hospital,age,pressure,died"]
    lines += [
        f"h{number % 4},{age:.1f},{pressure:.0f},{'yes' if age > 60 else 'no'}"
        for number, (age, pressure) in enumerate(
            zip(rng.normal(60, 9, 80), rng.normal(130, 15, 80), strict=True)
        )
    ]
    (folder / "patients.csv").write_text("\n".join(lines))
    path = folder / "patients.toml"
    path.write_text(PATIENTS)
    return path


@pytest.mark.slow
def test_an_audit_shows_rows_of_a_table_in_their_own_units(tmp_path: Path) -> None:
    done = run_cli("audit-privacy", write_patients(tmp_path), "--out", "audit", "--rows", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "audit" / "audit.json").read_text())
    plain, clipped, released = document["updates"][:3]
    assert [each["verdict"] for each in (plain, clipped, released)] == [
        "recovered",
        "recovered",
        "not recovered",
    ]
    assert [each["attacker"] for each in (clipped, released)] == [
        "the coordinator",
        "a reader of two models",
    ]
    pair = plain["examples"][0]
    assert pair["row"] == pair["reconstruction"] and pair["row"]["age"].endswith(" years")
    assert pair["row"]["age"] in done.stdout
    assert 0 <= document["canaries"]["lower"] < document["canaries"]["claimed"]
    assert document["membership"]["members"] == 64
    assert (tmp_path / "audit" / "reconstructions.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "audit" / "work").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--noise-multiplier", "1"], ["--clip-norm"], id="noise without a norm"),
        pytest.param(
            ["--run", "no-such-run", "--updates-only"], ["--run", "--updates-only"], id="run and no model"
        ),
        pytest.param(["--run", "."], ["experiment.toml"], id="no run"),
        pytest.param(
            options(['simulation.attack={ name = "sign_flip", clients = 4 }']),
            ["simulation.attack"],
            id="an attack",
        ),
    ],
)
def test_what_cannot_be_audited_is_refused(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = run_here("audit-privacy", "--out", "audit", *arguments, cwd=tmp_path)
    assert_refused(done, *words)
    assert not (tmp_path / "audit").exists()
