"""One data schema from the table to the device to the prediction: an awkward table, read alike everywhere."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloop
from coordinator.experiments.objects import name_objects
from coordinator.experiments.schema import Experiment
from edge_client.data import DataConfig, DataProblem, open_data, table_reader
from edge_client.serving.predict import accuracy, errors, from_logits
from edge_client.serving.records import read_records
from edge_client.serving.rows import Reading, read_inputs
from edge_client.train.torch_trainer import TorchRuntime
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import schema as schemas
from edge_client.wire.schema import ColumnSchema, DataSchema
from edge_client.wire.strict import InvalidDocument
from models import zoo
from models.datasets import Dataset, from_settings, preview
from tests.support.awkward_table import COLUMNS, OLDEST, RAREST, awkward_rows, write
from tests.support.require import require


def load(path: Path, scale: str = "federated", **more: object) -> Dataset:
    return from_settings(
        {
            "dataset": "csv",
            "path": str(path),
            "label": "outcome",
            "site": "site",
            "exclude": ["patient"],
            "scale": scale,
            "categories": {"max": 100, "minimum_count": 10},
            **more,
        }
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "all.csv"
    return write(path, awkward_rows(), COLUMNS, "utf-8-sig", ";")


def schema_of(dataset: Dataset) -> DataSchema:
    """The schema as it travels: written and read again."""
    assert dataset.schema is not None
    return schemas.from_json(dataset.schema.to_json())


@pytest.mark.parametrize("scale", ["federated", "site", "fixed"])
def test_a_device_reads_its_site_as_the_simulation_does(table: Path, tmp_path: Path, scale: str) -> None:
    given = {"age": [40, 11], "dose": [1000, 300], "admitted": [17000, 900]}
    dataset = load(table, scale, **({"fixed": given} if scale == "fixed" else {}))
    shuffled = ["outcome", "dose", "split", "code", "admitted", "ward", "age", "patient"]
    assert dataset.site is not None
    for index, site in enumerate(dataset.site_names):
        own = [row for row in awkward_rows() if row[COLUMNS.index("site")] == site]
        path = write(tmp_path / f"{index}.csv", own, shuffled, "latin-1", "|")
        options = {"split": "split", "encoding": "latin-1"}
        device = open_data(DataConfig("csv", path, options), schema_of(dataset))
        for examples, held_out in ((device.train(), False), (device.held_out(), True)):
            rows = (dataset.site == index) & (dataset.test == held_out)
            np.testing.assert_array_equal(examples.x, dataset.x[rows])
            np.testing.assert_array_equal(examples.y, dataset.y[rows])


def test_a_site_may_have_another_encoding_than_the_training_table(table: Path, tmp_path: Path) -> None:
    """Its own option is taken; without one, UTF-8 is not read as the Latin-1 of the training table."""
    trained = write(tmp_path / "trained.csv", awkward_rows(), COLUMNS, "latin-1", ";")
    dataset = load(trained, encoding="latin-1")
    schema = schema_of(dataset)
    own = write(tmp_path / "own.csv", awkward_rows(), COLUMNS[1:], "utf-8", ";")
    device = open_data(DataConfig("csv", own, {"split": "split", "encoding": "utf-8"}), schema)
    np.testing.assert_array_equal(device.train().x, dataset.x[~dataset.test])
    predicted = read_inputs(own, schema, "patients:1", Reading(encoding="utf-8"))
    np.testing.assert_array_equal(predicted.x, dataset.x)
    with pytest.raises(
        DataProblem, match="is UTF-8, while the model's training table was latin-1; say which"
    ):
        open_data(DataConfig("csv", own, {"split": "split"}), schema).train()
    with pytest.raises(DataProblem, match="--encoding utf-8 of a command"):
        read_inputs(own, schema, "patients:1")
    with pytest.raises(DataProblem, match=r'data\.encoding = "utf-8"'):
        from_settings({"dataset": "csv", "path": str(own)}, schema=schema)
    marked = write(tmp_path / "marked.csv", awkward_rows(), COLUMNS[1:], "utf-8-sig", ";")
    np.testing.assert_array_equal(read_inputs(marked, schema, "patients:1").x, dataset.x)
    np.testing.assert_array_equal(
        read_inputs(trained, schema, "patients:1", Reading(("patient",))).x, dataset.x
    )


def test_a_parquet_file_is_read_in_simulation_as_on_a_device(table: Path, tmp_path: Path) -> None:
    """Typed columns: numbers with gaps, dates and truth values; one schema for the table as Parquet and as CSV."""
    if find_spec("pyarrow") is None:
        require("pyarrow", "it is not installed")
    import pyarrow
    from pyarrow import parquet

    columns = {name: [row[place] for row in awkward_rows()] for place, name in enumerate(COLUMNS)}
    typed: dict[str, Any] = dict(columns)
    typed["age"] = [int(cell) for cell in columns["age"]]
    typed["dose"] = [float(cell.replace(",", ".")) if cell else None for cell in columns["dose"]]
    typed["admitted"] = [datetime.strptime(cell, "%d.%m.%Y").date() for cell in columns["admitted"]]
    path = tmp_path / "all.parquet"
    parquet.write_table(pyarrow.table(typed), path)
    dataset, plain = load(path), load(table)
    np.testing.assert_array_equal(dataset.x, plain.x)
    np.testing.assert_array_equal(dataset.y, plain.y)
    assert schema_of(dataset) == schema_of(plain)
    parquet.write_table(pyarrow.table({name: each for name, each in typed.items() if name != "site"}), path)
    device = open_data(DataConfig("parquet", path, {"split": "split"}), schema_of(dataset)).train()
    np.testing.assert_array_equal(device.x, dataset.x[~dataset.test])
    with pytest.raises(DataProblem, match=r"data\.encoding is that of a text file"):
        load(path, encoding="latin-1")
    parquet.write_table(pyarrow.table({**typed, "age": [[1, 2]] * len(typed["age"])}), path)
    with pytest.raises(DataProblem, match="row 1, column 'age': holds a list"):
        load(path)


def test_a_device_trains_to_the_same_update(table: Path, tmp_path: Path) -> None:
    dataset = load(table)
    path = write(tmp_path / "own.csv", awkward_rows(), COLUMNS[1:], "utf-8", ";")
    device = open_data(DataConfig("csv", path, {"split": "split"}), schema_of(dataset)).train()
    width = dataset.input_shape[0]
    spec = zoo.get("mlp", input_shape=(width,), classes=3, hidden=[8])
    trainer = Trainer(TorchRuntime(spec.build(0), spec.loss))
    params = {name: value.detach().numpy() for name, value in spec.build(3).state_dict().items()}
    task = TrainTask(seed=5, batch_size=16, lr=0.1, epochs=1)
    simulated = replace(device, x=dataset.x[~dataset.test], y=dataset.y[~dataset.test])
    first, second = (trainer.train(params, task, data).update for data in (device, simulated))
    for name, delta in first.delta.items():
        np.testing.assert_array_equal(delta, second.delta[name])


def test_rows_to_predict_are_read_as_the_training_rows_were(table: Path, tmp_path: Path) -> None:
    dataset = load(table)
    columns = ["dose", "admitted", "ward", "code", "age"]
    path = write(tmp_path / "new.csv", awkward_rows(), columns, "latin-1", "|")
    inputs = read_inputs(path, schema_of(dataset), "patients:1", Reading(encoding="latin-1"))
    np.testing.assert_array_equal(inputs.x, dataset.x)
    assert inputs.y is None
    known = read_inputs(table, schema_of(dataset), "patients:1")
    assert known.y is not None
    np.testing.assert_array_equal(known.y, dataset.y)


@pytest.mark.parametrize("empty", ["", "NaN"])
@pytest.mark.parametrize("block_rows", [100, 1 << 20])
def test_an_empty_label_column_is_no_label(
    table: Path, tmp_path: Path, empty: str, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spreadsheets keep the column when its cells are emptied. Where only some are, that is said."""
    monkeypatch.setattr(table_reader, "BLOCK_ROWS", block_rows)
    dataset = load(table)
    outcome = COLUMNS.index("outcome")
    rows = [[*row[:outcome], empty] for row in awkward_rows()]
    path = write(tmp_path / "new.csv", rows, COLUMNS, "utf-8", ";")
    found = read_inputs(path, schema_of(dataset), "patients:1")
    assert found.y is None
    np.testing.assert_array_equal(found.x, dataset.x)
    some = write(tmp_path / "some.csv", [*awkward_rows()[:300], *rows[300:]], COLUMNS, "utf-8", ";")
    with pytest.raises(
        DataProblem, match=r"column 'outcome'.*label is empty, and other rows.*--leave-out 'outcome'"
    ):
        read_inputs(some, schema_of(dataset), "patients:1")
    left_out = read_inputs(some, schema_of(dataset), "patients:1", Reading(("outcome",)))
    assert left_out.y is None and len(left_out.x) == len(rows)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["dose", "admitted", "ward", "code", "agee"], "no column 'age' for a feature, did you mean 'agee'"),
        (["dose", "admitted", "ward", "code", "age", "site", "weight"], "no column 'weight'"),
        (["dose", "ward", "code", "age", "weight"], r"no column 'admitted'[^\n]*\n.*no column 'weight'"),
    ],
)
def test_columns_that_are_missing_or_unknown_are_refused(
    table: Path, tmp_path: Path, columns: list[str], message: str
) -> None:
    path = tmp_path / "new.csv"
    path.write_text(";".join(columns) + "\n" + ";".join(["1"] * len(columns)) + "\n")
    with pytest.raises(DataProblem, match=message):
        read_inputs(path, schema_of(load(table)), "patients:1")


@pytest.mark.parametrize("scale", ["federated", "site", "none"])
def test_rows_for_a_trained_model_are_read_as_its_training_rows_were(
    table: Path, tmp_path: Path, scale: str
) -> None:
    features = {"features": ["ward", "code"]} if scale == "none" else {}  # numbers have gaps
    dataset = load(table, scale, **features)
    schema = schema_of(dataset)
    given: dict[str, object] = {"dataset": "csv", "site": "site", "encoding": "latin-1"}
    shuffled = ["outcome", "site", "dose", "split", "code", "admitted", "ward", "age", "patient"]
    path = write(tmp_path / "again.csv", awkward_rows(), shuffled, "latin-1", "|")
    again = from_settings({**given, "path": str(path)}, schema=schema)
    assert again.site_names == dataset.site_names
    for name in ("x", "y", "test", "site"):
        np.testing.assert_array_equal(getattr(again, name), getattr(dataset, name))
    if scale == "federated":  # other rows are scaled by the model's moments, not by their own
        few = write(tmp_path / "few.csv", awkward_rows()[:50], shuffled, "latin-1", "|")
        some = from_settings({**given, "path": str(few)}, schema=schema)
        np.testing.assert_array_equal(some.x, dataset.x[:50])
        with pytest.raises(DataProblem, match=r"leave data\.scale out"):
            from_settings({**given, "path": str(few), "scale": "site"}, schema=schema)
        with pytest.raises(DataProblem, match=r"expected a table, such as table\.csv"):
            from_settings({"dataset": "digits"}, schema=schema)
    unlabelled = write(tmp_path / "none.csv", awkward_rows(), shuffled[1:], "latin-1", "|")
    with pytest.raises(DataProblem, match="no column 'outcome' for the label"):
        from_settings({**given, "path": str(unlabelled)}, schema=schema)


def test_a_site_scaled_model_needs_the_sites_rows(table: Path) -> None:
    with pytest.raises(DataProblem, match="--site-rows TABLE"):
        read_inputs(table, schema_of(load(table, "site")), "patients:1")


def test_the_schema_gives_no_rare_text_and_no_single_value_away(table: Path) -> None:
    text = schema_of(load(table)).to_json()
    assert RAREST not in text and OLDEST not in text and "P000001" not in text
    document = json.loads(text)
    listed = [name for column in document["columns"] for name in column["categories"]]
    rows = [row for row in awkward_rows() if row[COLUMNS.index("split")] == "train"]
    for name in listed:
        assert sum(name in (row[3], row[4]) for row in rows) >= 10
    code = next(column for column in document["columns"] if column["name"] == "code")
    assert code["other"] and code["categories"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("classes", ["a", "b", "c"]),
        ("standardise", "local"),
        ("features", ["age"]),
        ("scale", 0.5),
        ("categories", {"ward": ["x"]}),
    ],
)
def test_a_device_whose_configuration_contradicts_the_schema_is_refused(
    table: Path, option: str, value: object
) -> None:
    with pytest.raises(DataProblem, match=f"option {option}"):
        open_data(DataConfig("csv", table, {"split": "split", option: value}), schema_of(load(table)))


def test_spellings_are_reported_and_folded_on_request(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    cells = ["Male", "male ", "FEMALE", "female"] * 20
    path.write_text("sex,label\n" + "".join(f"{cell},{row % 2}\n" for row, cell in enumerate(cells)))
    settings = {"dataset": "csv", "path": str(path), "scale": "federated"}
    plain = from_settings({**settings, "categories": {"minimum_count": 1}})
    folded = from_settings({**settings, "categories": {"minimum_count": 1, "fold": True}})
    assert plain.input_shape == (4,) and folded.input_shape == (2,)
    (note,) = [note for note in plain.notes if "data.categories.fold = true" in note]
    assert (
        "spells 2 texts in more than one way" in note and "ale" not in note
    )  # one row may have the spelling
    assert "Column 'sex' has both 'Male' and 'male'." in preview(plain, private=True)
    assert not any("has both" in line for line in preview(plain) + preview(folded, private=True))


def test_names_of_classes_that_a_schema_makes_public_are_pointed_out(tmp_path: Path) -> None:
    """Every class is named in the schema, also a rare one; spellings of one class are no class each by accident."""
    path = tmp_path / "t.csv"
    labels = ["Yes", "yes", "no"] * 20 + ["only one"]
    path.write_text("age,label\n" + "".join(f"{row},{label}\n" for row, label in enumerate(labels)))
    settings = {"dataset": "csv", "path": str(path), "scale": "federated"}
    notes = from_settings({**settings, "categories": {"minimum_count": 10}}).notes
    assert any("The label's classes Yes, yes differ only in case" in note for note in notes)
    assert any(note.startswith("1 class has fewer than 10 training rows") for note in notes)
    plain = from_settings({**settings, "categories": {"minimum_count": 1}}, seed=1).notes
    assert not any("fewer than" in note for note in plain)


def test_all_columns_with_a_problem_are_named_at_once(tmp_path: Path, table: Path) -> None:
    schema = schema_of(load(table))
    path = tmp_path / "bad.csv"
    path.write_text("age;dose;ward;code;admitted\nold;much;nowhere;C0001;yesterday\n")
    with pytest.raises(DataProblem) as raised:
        read_inputs(path, schema, "patients:1")
    assert [name for name in ("age", "dose", "ward", "admitted") if f"'{name}'" in str(raised.value)] == [
        "age",
        "dose",
        "ward",
        "admitted",
    ]


def test_a_schema_that_contradicts_itself_is_refused(table: Path) -> None:
    document = json.loads(schema_of(load(table)).to_json())
    for change, message in (
        ({"format": 9}, "format is 9"),
        ({"input_shape": [3]}, "values of an example"),
        ({"scale": "none"}, "do not fit scale"),
        ({"columns": [*document["columns"], document["columns"][0]]}, "twice"),
    ):
        with pytest.raises(InvalidDocument, match=message):
            schemas.from_document({**document, **change})


def test_quantities_are_predicted_in_their_own_unit(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("size,price\n" + "".join(f"{row},{1000 + 10 * row}\n" for row in range(40)))
    dataset = from_settings({"dataset": "csv", "path": str(path), "label": "price", "task": "regression"})
    schema = schema_of(dataset)
    found = from_logits(dataset.y[:, None].astype(np.float32), "prices", schema)
    np.testing.assert_allclose(
        [each.value for each in found], [1000 + 10 * row for row in range(40)], rtol=1e-6
    )
    inputs = read_inputs(path, replace(schema, scale="none"), "prices")
    assert inputs.y is not None and inputs.y.tolist() == [1000 + 10 * row for row in range(40)]
    wrong = errors([replace(each, value=(each.value or 0) + 7) for each in found], inputs.y, schema)
    assert wrong is not None and wrong["mae"] == pytest.approx(7) and accuracy(found, inputs.y) is None


@pytest.mark.parametrize(
    ("column", "message"), [("nothing", "no column 'nothing' for --leave-out"), ("age", "needs column 'age'")]
)
def test_only_columns_that_are_there_and_no_inputs_are_left_out(
    table: Path, column: str, message: str
) -> None:
    with pytest.raises(DataProblem, match=message):
        read_inputs(table, schema_of(load(table)), "patients:1", Reading((column,)))


class Frame:
    """As much of a pandas DataFrame as is used of one."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns, self._rows = list(columns), zip(*columns.values(), strict=True)

    def to_dict(self, orient: str) -> list[dict[str, Any]]:
        assert orient == "records"
        return [dict(zip(self.columns, row, strict=True)) for row in self._rows]


def test_a_result_predicts_a_site_scaled_table_as_the_command_does(table: Path, tmp_path: Path) -> None:
    dataset = load(table, "site", site="", exclude=["patient", "site"])
    schema = schema_of(dataset)
    spec = zoo.get("logreg", input_shape=dataset.input_shape, classes=3)
    params = {name: value.detach().numpy() for name, value in spec.build(3).state_dict().items()}
    report = {
        "data": {"schema": json.loads(schema.to_json()), "classes": 3, "task": "classification",
                 "input_shape": list(dataset.input_shape)},
        "experiment": Experiment.model_validate({"model": {"name": "logreg"}}).model_dump(mode="json"),
    }  # fmt: skip
    result = fedloop.Result(tmp_path, report, params)
    labels, _ = result.predict(dataset.x)
    site = write(tmp_path / "site.csv", awkward_rows(), [*COLUMNS[:6], *COLUMNS[7:]], "latin-1", ";")
    trained = [row for row in awkward_rows() if row[COLUMNS.index("split")] == "train"]
    training = write(tmp_path / "training.csv", trained, COLUMNS, "latin-1", ";")
    found, _ = result.predict(site, site_rows=training, leave_out=["patient"], encoding="latin-1")
    np.testing.assert_array_equal(found, labels)
    names = ["age", "dose", "ward", "code", "admitted"]
    cells = {name: [row[COLUMNS.index(name)] for row in awkward_rows()] for name in names}
    cells["dose"] = [float(cell.replace(",", ".")) if cell else None for cell in cells["dose"]]
    frame = Frame(**cells, room=[""] * len(labels))
    found, _ = result.predict(frame, site_rows=training, leave_out=["room"], encoding="latin-1")
    np.testing.assert_array_equal(found, labels)
    for x, options, message in (
        (site, {}, "site_rows in Python"),
        (dataset.x, {"leave_out": ["age"]}, "for rows in natural form"),
        (Frame(age=[1]), {"encoding": "latin-1"}, "encoding: is that of a file"),
    ):
        with pytest.raises(fedloop.UserError, match=message):
            result.predict(x, **options)


def test_a_frame_is_trained_on_as_the_table_of_its_rows_is(tmp_path: Path) -> None:
    rows = range(40)
    frame = Frame(
        age=[None if row == 3 else 20 + row / 3 for row in rows],
        ward=[("Süd; 1", "ICU", float("nan"))[row % 3] for row in rows],
        seen=[datetime(2024, 3, 1 + row % 28) for row in rows],
        outcome=[bool(row % 2) for row in rows],
    )
    document = {"data": {"label": "outcome"}}
    named, fill = name_objects(document, tmp_path, None, frame, None)
    fill(tmp_path)
    assert stat.S_IMODE((tmp_path / "work").stat().st_mode) == 0o700
    found = from_settings(named["data"])
    assert found.schema is not None and found.class_names == ("False", "True")
    assert [column.kind for column in found.schema.columns] == ["number", "category", "date"]
    assert found.schema.columns[1].categories == ("ICU", "Süd; 1")
    with pytest.raises(fedloop.UserError, match="or a pandas DataFrame"):
        name_objects(document, tmp_path, None, [1, 2], None)


def test_records_are_read_as_the_rows_of_a_file(tmp_path: Path) -> None:
    schema = DataSchema(
        "table",
        (4,),
        "float32",
        columns=(
            ColumnSchema("age", mean=50.0, deviation=10.0),
            ColumnSchema("ward", "category", categories=("1", "ICU"), other=True),
        ),
        label="outcome",
        scale="federated",
    )
    path = tmp_path / "new.csv"
    path.write_text("ward,age\nICU,61\n1,\n,40.5\n")
    records = [
        {"age": 61, "ward": "ICU"},
        {"age": None, "ward": 1.0},
        {"age": np.float64(40.5), "ward": float("nan")},
    ]

    np.testing.assert_array_equal(
        read_records(records, schema, "patients").x, read_inputs(path, schema, "patients").x
    )
    for wrong, message in (
        ([{"age": 61}], "no column 'ward'"),
        ([{"age": 61, "ward": "1", "weight": 3}], "no column 'weight'|'weight'"),
        ([{"age": "old", "ward": "1"}], "'old' is not a number"),
        ([records[0], {"age": 3}], "row 2: column 'ward'"),
        ([[1, 2]], "row 1: expected a mapping"),
    ):
        with pytest.raises(DataProblem, match=message):
            read_records(wrong, schema, "patients")
