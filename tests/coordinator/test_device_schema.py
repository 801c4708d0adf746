"""A data schema of a table that only devices hold: made from statistics, checked, and bounded against a device that lies."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.datacenter.compression_sources import Pipeline, Source, SourceReader
from coordinator.datacenter.jobs import Environment
from coordinator.datacenter.training_data import parse_data_options
from coordinator.errors import UserError
from coordinator.experiments import experiment as experiments
from coordinator.experiments.device_schema import as_table
from coordinator.experiments.schema import Categories, Data, Experiment
from coordinator.fleets.robust_scale import OUT_OF_PROPORTION, scale_of
from coordinator.reports.statistics_schema import make_schema
from coordinator.toml_files import parse_toml
from edge_client.data import DataConfig, DataProblem, open_data
from edge_client.data.statistics import deviation, read_statistics
from edge_client.infer import runtime
from edge_client.serving.predict import predict
from edge_client.serving.rows import read_inputs
from edge_client.train.evaluation import softmax
from edge_client.wire import arrays
from edge_client.wire import schema as schemas
from edge_client.wire.schema import ColumnSchema, DataSchema
from edge_client.wire.statistics import ColumnStatistics, StatisticsRequest, StatisticsResult
from tests.support.cli import assert_refused, run_here

DATA = Data(dataset="patients", label="outcome")
REQUEST = StatisticsRequest(label="outcome", exclude=("split",))

SCHEMA = DataSchema(
    kind="table",
    input_shape=(3,),
    input_dtype="float32",
    classes=("died", "home"),
    columns=(
        ColumnSchema("age", mean=50.0, deviation=10.0),
        ColumnSchema("ward", "category", categories=("er",), other=True),
    ),
    label="outcome",
    scale="federated",
    minimum_count=10,
)


def numbers(count: int, mean: float, spread: float, **more: Any) -> ColumnStatistics:
    return ColumnStatistics("number", count, mean=mean, squares=count * spread**2, **more)


def site(rows: int, labels: Mapping[str, int] | None = None, **columns: ColumnStatistics) -> StatisticsResult:
    labels = {"home": rows // 2, "died": rows - rows // 2} if labels is None else labels
    return StatisticsResult(rows, 10, columns, labels, rows - sum(labels.values()))


def table(folder: Path, name: str, seed: int) -> DataConfig:
    """60 rows with a date, gaps and text labels, at `a` a rare ward; the configuration says only where they are."""
    rng = np.random.default_rng(seed)
    lines = ["age,seen,ward,outcome,split"]
    for row in range(60):
        age = "" if row % 7 == 3 else f"{rng.normal(40 + seed, 6):.3f}"
        ward = f"only-{name}" if (name, row) == ("a", 5) else ["er", "icu"][rng.integers(2)]
        part = "test" if row % 5 == 4 else "train"
        lines.append(f"{age},2024-03-{1 + row % 28:02},{ward},{['home', 'died'][row % 2]},{part}")
    (folder / f"{name}.csv").write_text("\n".join(lines))
    return DataConfig("csv", folder / f"{name}.csv", {"split": "split"})


def test_devices_that_describe_nothing_train_by_the_schema_that_their_statistics_make(tmp_path: Path) -> None:
    tables = {name: table(tmp_path, name, seed) for seed, name in enumerate(("a", "b", "c"))}
    results = {name: read_statistics(config, REQUEST) for name, config in tables.items()}
    schema, notices = make_schema(DATA, results, 10.0)
    assert notices == []
    age, seen, ward = schema.columns
    assert (age.kind, seen.kind, ward.kind) == ("number", "date", "category")
    assert (ward.categories, ward.other, schema.classes) == (("er", "icu"), True, ("died", "home"))
    assert "only" not in schema.to_json()

    ages = np.concatenate(
        [
            [
                float(line.split(",")[0])
                for line in config.path.read_text().splitlines()[1:]
                if line[0] != "," and line.endswith("train")
            ]
            for config in tables.values()
            if config.path is not None
        ]
    )
    assert (age.mean, age.deviation) == (pytest.approx(ages.mean()), pytest.approx(ages.std()))

    rows = [open_data(config, schemas.from_json(schema.to_json())).train() for config in tables.values()]
    x = np.concatenate([each.x for each in rows])
    assert x.shape == (3 * 48, *schema.input_shape)
    present = x[:, 0][x[:, 0] != 0]
    assert abs(present.mean()) < 1e-5 and present.std() == pytest.approx(1, abs=1e-5)
    assert (x[:, 2:].sum(axis=1) == 1).all() and x[:, 4].sum() == 1


def test_devices_learn_a_quantity_by_the_schema_that_their_statistics_make(tmp_path: Path) -> None:
    data = Data(dataset="homes", label="price", task="regression")
    asked = StatisticsRequest(label="price", quantity=True)
    tables, own = {}, []
    for seed, name in enumerate(("a", "b", "c")):
        rng = np.random.default_rng(seed)
        prices = rng.normal(300 + 40 * seed, 60, 80).round(2)
        lines = [
            f"{rng.normal(90, 20):.2f},{price},{'test' if row % 4 == 3 else 'train'}"
            for row, price in enumerate(prices)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["area,price,split", *lines]))
        tables[name] = DataConfig("csv", tmp_path / f"{name}.csv", {"split": "split"})
        own.append(prices[np.arange(80) % 4 != 3])
    pool = np.concatenate(own)

    results = {name: read_statistics(config, asked) for name, config in tables.items()}
    schema, notices = make_schema(data, results, 10.0)

    assert notices == [] and [column.name for column in schema.columns] == ["area"]
    assert (schema.classes, schema.label) == ((), "price")
    assert schema.label_scale == (pytest.approx(pool.mean(), rel=1e-6), pytest.approx(pool.std(), rel=1e-6))
    y = np.concatenate(
        [open_data(config, schemas.from_json(schema.to_json())).train().y for config in tables.values()]
    )
    np.testing.assert_allclose(y, (pool - pool.mean()) / pool.std(), rtol=1e-5, atol=1e-5)
    document = {"data": {"dataset": "homes", "schema": as_table(schema), "task": "regression"}}
    assert experiments.resolve(document, "homes", fleet="devices").data.task == "regression"


def test_a_schema_of_a_quantity_needs_its_figures_from_every_device() -> None:
    data = Data(dataset="homes", label="price", task="regression")
    numbered = site(40, {}, area=numbers(40, 90, 20), price=numbers(40, 300, 60))
    with pytest.raises(UserError, match="'price' is not reported as a quantity by: south; "):
        make_schema(data, {"north": numbered, "south": site(40, {}, area=numbers(40, 90, 20))}, 10.0)
    same = site(40, {}, area=numbers(40, 90, 20), price=numbers(40, 300, 0))
    with pytest.raises(UserError, match="every label of 'price' is 300"):
        make_schema(data, {"north": same, "south": same}, 10.0)
    with pytest.raises(UserError, match=r'if it is a quantity, set data\.task = "regression"'):
        make_schema(data.model_copy(update={"task": "classification"}), {"north": same, "south": same}, 10.0)


def test_contradictions_between_devices_are_all_refused_by_name() -> None:
    texts = ColumnStatistics("category", 40, categories={"high": 40})
    results = {
        "north": site(40, age=numbers(40, 50, 5), dose=numbers(40, 1, 1)),
        "south": site(40, {"Home": 20, "died": 20}, age=texts, dose=numbers(40, 1, 1)),
        "west": site(40, {"0": 20, "1": 20}, age=numbers(40, 50, 5, date=True)),
    }
    with pytest.raises(UserError) as caught:
        make_schema(DATA, results, 10.0)
    problem = str(caught.value)
    assert "column 'age' is of numbers at north; of dates at west; of texts at south" in problem
    assert "column 'dose' is no input at: west" in problem
    assert "'home' at north; 'Home' at south" in problem
    assert "classes are numbers at west, and texts at north, south" in problem


def test_a_schema_needs_two_classes_and_an_input() -> None:
    with pytest.raises(UserError, match="has 1 classes with the minimum count"):
        make_schema(DATA, {"a": site(20, {"home": 20}, age=numbers(20, 1, 1))}, 10.0)
    with pytest.raises(UserError, match="no column is left"):
        make_schema(DATA, {"a": site(20, age=ColumnStatistics("number", 0))}, 10.0)


def test_withheld_statistics_are_absent_and_reported() -> None:
    wards = ColumnStatistics("category", 40, categories={"er": 25, "ICU": 10}, other=5)
    results = {
        "north": site(40, {"home": 30}, ward=wards, rare=ColumnStatistics("number", 0)),
        "south": site(40, {"died": 30, "home": 10}, ward=wards, rare=ColumnStatistics("number", 0)),
    }
    folding = DATA.model_copy(update={"categories": Categories(max=1, fold=True), "scale": "site"})
    schema, notices = make_schema(folding, results, 10.0)
    assert schema.columns == (ColumnSchema("ward", "category", categories=("er",), other=True, fold=True),)
    assert schema.ignored == ("site", "split", "rare")
    assert "no inputs: rare" in notices[0] and "north (10 rows)" in notices[1]


# One device lies.

HONEST = [(200, 40.0, 6.0), (150, 42.0, 5.0), (300, 39.0, 7.0), (120, 44.0, 6.5)]


@settings(max_examples=200)
@given(
    rows=st.integers(10, 2**53),
    mean=st.floats(-1e30, 1e30),
    spread=st.floats(0, 1e30),
    honest=st.integers(2, 4),
)
def test_one_device_that_lies_moves_the_scale_within_the_bound(
    rows: int, mean: float, spread: float, honest: int
) -> None:
    results = {str(index): site(each[0], x=numbers(*each)) for index, each in enumerate(HONEST[:honest])}
    _, center, _ = scale_of(results, 10.0).moments["x"]
    attacked = scale_of(
        {**results, "liar": StatisticsResult(rows, 10, {"x": numbers(rows, mean, spread)})}, 10.0
    )
    _, moved, deviation_after = attacked.moments["x"]
    # The honest devices' means lie within 5, and their root mean square distances from any of these below 9.
    reach = OUT_OF_PROPORTION * 9
    assert abs(moved - center) <= reach + 5
    assert deviation_after <= math.hypot(reach, reach + 5)


def test_a_device_out_of_proportion_is_left_out_by_name_and_many_rows_are_capped() -> None:
    results = {
        name: site(rows, x=numbers(rows, mean, 6))
        for name, rows, mean in (("a", 100, 40.0), ("b", 100, 42.0))
    }
    honest = scale_of(results, 10.0)
    assert honest.notices == ()
    far = scale_of({**results, "liar": site(100, x=numbers(100, 1e9, 6))}, 10.0)
    assert far.moments == honest.moments
    assert "liar (mean 1e+09" in far.notices[0]
    wide = scale_of({**results, "liar": site(100, x=numbers(100, 41, 1e6))}, 10.0)
    assert wide.moments == honest.moments
    many = scale_of({**results, "liar": site(10**9, x=numbers(10**9, 50, 6))}, 10.0)
    assert many.moments["x"][0] == 1200
    assert "counts 1,000 of the 1,000,000,000 rows that liar" in many.notices[0]
    assert (
        scale_of({**results, "big": site(10**9, x=numbers(10**9, 50, 6))}, 0).moments["x"][0] == 10**9 + 200
    )


def test_columns_that_are_constant_at_most_devices_keep_the_others() -> None:
    results = {name: site(100, x=numbers(100, 0.0, 0.0)) for name in "abc"}
    found = scale_of({**results, "d": site(100, x=numbers(100, 0.5, 0.5))}, 10.0)
    assert found.moments["x"][0] == 400 and found.moments["x"][2] > 0
    assert deviation(results["a"].columns["x"]) == 0


# The key of the experiment file.


def experiment(folder: Path, schema: DataSchema = SCHEMA, more: str = "") -> Experiment:
    (folder / "schema.json").write_text(schema.to_json())
    (folder / "my.toml").write_text(f'[data]\ndataset = "patients"\nschema = "schema.json"\n{more}')
    document = experiments.read_document(folder / "my.toml", [], "devices")
    return experiments.resolve(document, "my.toml", "devices")


def test_a_schema_is_read_with_the_experiment_and_recorded_in_it(tmp_path: Path) -> None:
    resolved = experiment(tmp_path)
    assert (resolved.data.read_schema(), resolved.data.label) == (SCHEMA, "outcome")
    assert resolved.data.described_shape == {
        "input_shape": [3],
        "classes": 2,
        "input_dtype": "float32",
        "task": "classification",
    }
    again = parse_toml(resolved.to_toml(), "experiment.toml")
    assert experiments.resolve(again, "experiment.toml", "devices", stored=True) == resolved
    stored = json.loads(json.dumps(resolved.model_dump(mode="json")))
    assert Experiment.model_validate(stored).data.read_schema() == SCHEMA


@pytest.mark.parametrize(
    ("schema", "more", "expected"),
    [
        (SCHEMA, "classes = 3\ninput_shape = [3]", "data.classes = 3, but data.schema says 2"),
        (SCHEMA, 'label = "ward"', "data.label = 'ward', but data.schema says 'outcome'; leave"),
        (SCHEMA, 'label = "label"', "data.label = 'label', but data.schema says 'outcome'; leave"),
        (SCHEMA, 'path = "own.csv"', r"the coordinator loads data\.path = .*own\.csv' itself"),
        (replace(SCHEMA, classes=()), "", "0 classes"),
        (replace(SCHEMA, label=""), "", "names no label"),
        (DataSchema("array", (3,), "float32"), "", "expected a table"),
        (replace(SCHEMA, classes=(), label_scale=(1.0, 2.0)), "", 'data.task = "regression"'),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(
    tmp_path: Path, schema: DataSchema, more: str, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        experiment(tmp_path, schema, more)


def test_a_schema_is_for_devices_and_data_of_theirs(tmp_path: Path) -> None:
    experiment(tmp_path)
    assert_refused(run_here("simulate", str(tmp_path / "my.toml")), "data.schema", "fedloop run")
    given = ("--set", f"data.schema={tmp_path / 'schema.json'}")
    assert_refused(run_here("simulate", *given), "data.dataset = 'digits'")
    assert_refused(
        run_here("simulate", "--set", "data.schema=nowhere.json"), "nowhere.json", "cannot be read"
    )
    (tmp_path / "schema.json").write_text("{}")
    assert_refused(run_here("simulate", *given), "format is None")
    assert_refused(run_here("statistics", "--schema-out", str(tmp_path / "s.json")), "--fleet")


def test_a_text_never_seen_in_training_is_refused_with_its_place_and_what_to_do(tmp_path: Path) -> None:
    complete = replace(
        SCHEMA,
        columns=(SCHEMA.columns[0], ColumnSchema("ward", "category", categories=("er", "icu"))),
    )
    (tmp_path / "new.csv").write_text("age,ward\n40,er\n41,maternity\n")
    with pytest.raises(DataProblem) as caught:
        read_inputs(tmp_path / "new.csv", complete, "triage")
    for part in ("line 3, column 'ward'", "'maternity' did not occur", "knows: er, icu", "remove the row"):
        assert part in str(caught.value)
    assert "option" not in str(caught.value)
    assert read_inputs(tmp_path / "new.csv", SCHEMA, "triage").x[:, 1:].tolist() == [[1, 0], [0, 1]]


def read_source(run: Path, name: str | None, data: Mapping[str, Any] = MappingProxyType({})) -> Source:
    """The model in the folder of a run, with the rows that `--data NAME` and `--set data.…` give."""
    options = parse_data_options(name, {"data": dict(data)} if data else {}, "export")
    return SourceReader(Pipeline(), Path(tempfile.mkdtemp(dir=run.parent)), Environment(), options).read(run)


def run_folder(folder: Path, resolved: Experiment) -> Path:
    run = folder / "run"
    run.mkdir()
    (run / "experiment.toml").write_text(resolved.to_toml())
    (run / "model.safetensors").write_bytes(b"not read")
    return run


def test_a_table_for_a_model_without_a_schema_of_one_needs_its_scale(tmp_path: Path) -> None:
    """The devices scaled their numbers as their configuration says, of which the run holds nothing."""
    (tmp_path / "my.toml").write_text('[data]\ndataset = "pixels"\ninput_shape = [2]\nclasses = 2\n')
    document = experiments.read_document(tmp_path / "my.toml", [], "devices")
    run = run_folder(tmp_path, experiments.resolve(document, "my.toml", "devices"))
    table = tmp_path / "own.csv"
    table.write_text("a,b,label\n" + "16,8,0\n8,4,1\n" * 20)
    with pytest.raises(
        UserError, match=r"own\.csv: .*run has no schema of a table.*give a \.npz.*data\.scale=fixed"
    ):
        read_source(run, str(table))
    fixed = {"scale": "fixed", "fixed": {"a": [0, 16], "b": [0, 16]}}
    assert set(read_source(run, str(table), fixed).arrays["x_test"].ravel().tolist()) == {1, 0.5, 0.25}

    np.savez(tmp_path / "rows.npz", x=np.full((40, 2), 0.5, np.float32), y=np.arange(40) % 2)
    assert np.unique(read_source(run, str(tmp_path / "rows.npz")).arrays["x_test"]).tolist() == [0.5]
    (run / "schema.json").write_text(DataSchema("array", (2,), "float32").to_json())
    with pytest.raises(UserError, match="has no schema of a table"):
        read_source(run, str(table))


@pytest.mark.slow
def test_a_run_on_rows_of_devices_is_exported_by_default_as_integers_that_answer_alike(
    tmp_path: Path,
) -> None:
    document = {"data": {"dataset": "patients", "schema": as_table(SCHEMA)}, "model": {"name": "logreg"}}
    run = run_folder(tmp_path, experiments.resolve(document, "triage", "devices"))
    params = {
        "fc.weight": np.array([[1, 0, 0.5], [-1, 0, -0.5]], np.float32),
        "fc.bias": np.zeros(2, np.float32),
    }
    arrays.write(run / "model.safetensors", params)
    (run / "schema.json").write_text(SCHEMA.to_json())
    rng = np.random.default_rng(0)
    rows = [f"{age:.1f},{['er', 'icu'][rng.integers(2)]}" for age in rng.normal(50, 10, 200)]
    died = [float(age) - 50 + 5 * (ward == "icu") > 0 for age, ward in (row.split(",") for row in rows)]
    lines = [f"{row},{'died' if each else 'home'}" for row, each in zip(rows, died, strict=True)]
    (tmp_path / "typical.csv").write_text("\n".join(["age,ward,outcome", *lines]))
    (tmp_path / "new.csv").write_text("ward;age\nicu;70\nnever seen;30\n")
    exported = run_here(
        "export", run, "--name", "triage", "--data", tmp_path / "typical.csv", "--out", tmp_path / "release"
    )
    assert exported.returncode == 0, exported.stderr
    assert "triage:1, static-int8, " in exported.stdout

    release = runtime.load(tmp_path / "release")
    assert release.manifest.schema == SCHEMA
    x = read_inputs(tmp_path / "new.csv", SCHEMA, "triage").x
    floats = softmax(x @ params["fc.weight"].T)
    answered = predict(release, x)
    assert [each.class_name for each in answered] == ["died", "home"]
    np.testing.assert_allclose([each.probability for each in answered], floats.max(axis=1), atol=0.05)


def test_rows_to_calibrate_such_a_model_on_are_read_by_its_schema(tmp_path: Path) -> None:
    run, table = run_folder(tmp_path, experiment(tmp_path)), tmp_path / "own.csv"
    (run / "schema.json").write_text(SCHEMA.to_json())
    table.write_text("ward;outcome;age\n" + "er;home;60\nicu;died;40\n" * 20)

    with pytest.raises(
        UserError, match=r"only devices hold the rows .* give --data, a table .* the label 'outcome'"
    ):
        read_source(run, None)
    (tmp_path / "few.csv").write_text("ward,outcome,age\ner,home,60\nicu,died,40\nicu,died,50\n")
    with pytest.raises(
        UserError, match=r"1 of --data's rows are held out, expected 2 at least.* give --data more rows"
    ):
        read_source(run, str(tmp_path / "few.csv"))
    with pytest.raises(UserError, match=r"leave data\.scale out"):
        read_source(run, str(table), {"scale": "site"})
    found = read_source(run, str(table))
    assert found.model["input_shape"] == [3] and "--data's 8 held-out rows" in found.scored
    x, y = (np.concatenate([found.arrays[f"{key}_{part}"] for part in ("train", "test")]) for key in "xy")
    assert {(*row, int(label)) for row, label in zip(x.tolist(), y, strict=True)} == {
        (1, 1, 0, 1),
        (-1, 0, 1, 0),
    }
