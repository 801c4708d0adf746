"""Rows stay private: every byte that is published of a model is searched for the rows it was made with."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from coordinator.operator import version_files
from coordinator.registry import registration
from coordinator.registry.registration import DeclaredFile
from models import zoo
from models.pretrain.params import params_of
from tests.support.cli import assert_refused, run_cli, run_here, started
from tests.support.row_search import rows_in
from tests.support.services import services_in
from tests.support.signed_releases import SignedReleases

pytestmark = pytest.mark.slow

RELEASE = {"manifest.json", "model.tflite", "report.json"}

CODE = """
import numpy as np

WORDS = "ward fever cough rash pulse scan dose night blood ache sleep heart lungs knee".split()


def scans(seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, 160)
    pixels = rng.integers(0, 180, (160, 8, 8)) + 25 * y[:, None, None]
    return {"x": (pixels / 255).astype(np.float32), "y": y, "classes": 3}


def sentences(seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 12))[:32].ljust(32) for _ in range(160)]


def notes(seed):
    return np.array([[ord(letter) - 32 for letter in text] for text in sentences(seed)], np.int32)
"""
SEED = 7


def own(name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(CODE, scope)
    return scope[name](SEED)


def table(path: Path) -> None:
    """799 patients in a csv."""
    rng = np.random.default_rng(1)
    means, spreads = [55, 120, 70, 5.5, 36.8, 28, 1.1], [15, 20, 12, 1.2, 0.6, 5, 0.3]
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "pressure", "pulse", "sugar", "fever", "bmi", "creatinine", "y"])
        for row in np.round(rng.normal(means, spreads, (799, 7)), 2).tolist():
            lines.writerow([*row, "died" if row[0] + row[1] > 175 else "recovered"])


def raw_rows(patients: Path) -> npt.NDArray[np.float64]:
    """[799, 7], as in the table."""
    with (patients / "patients.csv").open(encoding="utf-8") as file:
        return np.array([[float(word) for word in line[:-1]] for line in list(csv.reader(file))[1:]])


def scaled_rows(patients: Path) -> npt.NDArray[np.float32]:
    """The same as the model takes them."""
    arrays = patients / "trained/data/arrays"
    return np.concatenate([np.load(arrays / f"x_{part}.npy") for part in ("train", "test")])


def run_folder(folder: Path, data: str, model: str, shape: dict[str, Any]) -> Path:
    """What a finished run leaves: its experiment and its params."""
    folder.mkdir()
    (folder / "experiment.toml").write_text(
        f'seed = {SEED}\n[data]\ndataset = "{data}"\n[model]\nname = "{model}"\n', "utf-8"
    )
    module = zoo.get(model, **shape).build(0)
    safetensors.numpy.save_file(params_of(module), folder / "model.safetensors")
    return folder


def exported(folder: Path, name: str, out: Path, env: Mapping[str, str] | None = None) -> Path:
    arguments = ["export", folder, "--name", name, "--out", out, "--max-accuracy-drop", "1"]
    done = run_cli(*arguments, cwd=out.parent, env=env)
    assert done.returncode == 0, done.stderr
    return out


def registered(home: Path, *made: Path) -> None:
    """The folders as versions of a coordinator's registry, and the releases among them published."""
    with services_in(home) as services:
        for number, place in enumerate(made):
            kind, contents = version_files.gather(place)
            for content in contents.values():
                services.blobs.put(content.place.read_bytes())
            sent = {
                path: DeclaredFile(content.sha256, content.size_bytes) for path, content in contents.items()
            }
            registration.register(services, f"model-{number}", kind, sent, renumber=kind == "inference")


def published(folder: Path, *made: Path) -> Path:
    """All that leaves a machine of these folders: the releases themselves, a repository with them, a registry with all."""
    out = folder / "published"
    out.mkdir()
    registered(out / "coordinator", *made)
    releases = [each for each in made if (each / "manifest.json").exists()]
    SignedReleases(out / "repository").publish(*releases)
    for number, each in enumerate(releases):
        each.rename(out / f"release-{number}")
    return out


def assert_release_only(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == RELEASE
    golden = json.loads((folder / "manifest.json").read_bytes())["golden"]
    assert golden["real_x"] == golden["real_y"] == [] and golden["logits"]


@pytest.fixture(scope="module")
def patients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, and a model of it: `trained`, and `small` for devices."""
    folder = tmp_path_factory.mktemp("patients")
    table(folder / "patients.csv")
    data = f"dataset=csv path={folder / 'patients.csv'} label=y"
    sets = [word for each in data.split() for word in ("--set", f"data.{each}")]
    training = ["--set", "model.name=logreg", "--set", "train.steps=40"]
    for arguments in (
        ["pretrain", *sets, *training, "--out", "trained"],
        ["compress", "trained", "--out", "small"],
    ):
        done = run_cli(*arguments, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_no_row_of_a_table_is_published(patients: Path, tmp_path: Path) -> None:
    scaled = scaled_rows(patients)
    assert scaled.shape == (799, 7)
    release = exported(patients / "small", "patients", tmp_path / "release")
    assert_release_only(release)

    out = published(tmp_path, patients / "trained", patients / "small", release)

    lines = (patients / "patients.csv").read_text("utf-8").splitlines()[1:]
    assert rows_in(out, scaled, lines) == []
    assert rows_in(out, raw_rows(patients)) == []


def test_rows_that_folders_keep_are_for_their_user_alone(patients: Path) -> None:
    for rows in ("trained/data/arrays", "small/arrays"):
        assert stat.S_IMODE((patients / rows).stat().st_mode) == 0o700


def test_real_rows_of_data_that_is_not_public_are_refused(patients: Path, tmp_path: Path) -> None:
    out = tmp_path / "release"
    done = run_here("export", patients / "small", "--name", "patients", "--out", out, "--real-rows", "16")

    assert_refused(done, "--real-rows 16", "not marked as public", "data.public = true")
    assert not out.exists()


def test_rows_marked_as_public_are_published_loudly(patients: Path, tmp_path: Path) -> None:
    """And the search finds them, wherever they went."""
    small = shutil.copytree(patients / "small", tmp_path / "small")
    lineage = json.loads((small / "lineage.json").read_bytes())
    assert lineage["data_public"] is False
    (small / "lineage.json").write_text(json.dumps({**lineage, "data_public": True}))
    arguments = ["export", small, "--name", "patients", "--out", tmp_path / "release", "--real-rows", "8"]

    done = run_cli(*arguments, "--json")

    assert done.returncode == 0, done.stderr
    assert "PUBLISHED: 8 rows of the data" in done.stderr and "manifest.json" in done.stderr
    assert json.loads(done.stdout)["golden"]["real_rows"] == 8
    found = rows_in(published(tmp_path, tmp_path / "release"), scaled_rows(patients))
    assert {line.partition("/")[0] for line in found} == {"coordinator", "repository", "release-0"}
    assert all(line.endswith("numbers in text") for line in found)


@pytest.mark.extended
def test_no_text_is_published(tmp_path: Path) -> None:
    ids = own("notes")
    folder, shape = tmp_path / "small", {"input_shape": [32], "classes": 3, "input_dtype": "int32"}
    (folder / "arrays").mkdir(parents=True)
    np.save(folder / "arrays" / "x_test.npy", ids)
    np.save(folder / "arrays" / "y_test.npy", ids[:, 0] % 3)
    (folder / "model.json").write_text(json.dumps({"name": "textcls", "options": {"layers": 1}, **shape}))
    module = zoo.get("textcls", layers=1, input_shape=(32,), classes=3, input_dtype="int32").build(0)
    safetensors.numpy.save_file(params_of(module), folder / "model.safetensors")
    release = exported(folder, "notes", tmp_path / "release")
    assert_release_only(release)

    out = published(tmp_path, release)

    assert rows_in(out, ids, [text.strip() for text in own("sentences")]) == []


@pytest.mark.extended
def test_no_image_is_published_and_a_killed_export_leaves_none(tmp_path: Path) -> None:
    """SIGKILL while rows lie in the private folder: they are for their user alone, and gone once another one is made."""
    (tmp_path / "ward.py").write_text(CODE, "utf-8")
    run = run_folder(tmp_path / "run", "ward:scans", "cnn", {"input_shape": (8, 8), "classes": 3})
    release, scratch = tmp_path / "release", tmp_path / "tmp"
    scratch.mkdir()
    place = {"TMPDIR": str(scratch)}
    arguments = ["export", run, "--name", "scans", "--out", release]
    with started(*arguments, cwd=tmp_path, env=place) as export:
        assert export.reaches(lambda: any(scratch.glob("fedloop-private-*/compressed/arrays/x_test.npy")))
        export.send(signal.SIGKILL)
        export.process.wait()
    left = list(scratch.glob("fedloop-private-*"))
    assert left and all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in left)
    assert not release.exists()

    exported(run, "scans", release, env=place)

    assert not list(scratch.glob("fedloop-private-*"))
    assert_release_only(release)
    images, out = own("scans")["x"], published(tmp_path, release)
    for rows in (images, np.round(images * 255)):
        assert rows_in(out, rows) == []
