"""One table gives the same rows, to the bit, in a simulation and on a device."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.data import DataConfig, DataProblem, open_data
from edge_client.data.examples import Examples
from models.datasets import Dataset, load, table_notes

COLUMNS = ["dose", "ward", "age", "z", "outcome", "split"]
WARDS = ['intensive; "ICU"', "Chirurgie, Süd", "surgery", ""]
MISSING = ["", "NA", "?", "-", "null"]


def table(rows: int = 120) -> list[list[str]]:
    """Numbers with gaps, a number column that arrives standardised, texts with gaps, a label of texts."""
    rng = np.random.default_rng(11)
    z = rng.standard_normal(rows)
    z = (z - z.mean()) / z.std()
    return [
        [
            MISSING[row % 5] if row % 7 == 0 else f"{rng.normal(1000, 300):.3f}",
            WARDS[int(rng.integers(4))],
            str(int(rng.integers(20, 90))),
            repr(float(z[row])),
            ("recovered", "died", "no change")[int(rng.integers(3))],
            "Test" if row % 4 == 0 else "train",
        ]
        for row in range(rows)
    ]


def awkward(rows: list[list[str]], columns: Sequence[str] = COLUMNS, delimiter: str = ";") -> str:
    """With decimal commas where the delimiter allows them, a blank line, and quotes where they are needed."""
    if delimiter != ",":
        rows = [[cell.replace(".", ",") if cell[-1:].isdigit() else cell for cell in row] for row in rows]
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows([columns, *rows[:9], [], *rows[9:]])
    return text.getvalue()


def device_options(simulated: Dataset) -> dict[str, Any]:
    """What a device needs that gets no schema."""
    inline = table_notes.device_options(simulated.described)
    options: dict[str, Any] = tomllib.loads(f"options = {{ {inline} }}")["options"]
    return options


def read_by_device(path: Path, **options: Any) -> tuple[Examples, Examples]:
    connector = open_data(DataConfig("csv", path, options))
    return connector.train(), connector.held_out()


def assert_same(simulated: Dataset, rows: Any, device: tuple[Examples, Examples]) -> None:
    for held_out, examples in zip((False, True), device, strict=True):
        chosen = rows & (simulated.test == held_out)
        assert chosen.any()
        assert examples.x.dtype == simulated.x.dtype and examples.y.dtype == simulated.y.dtype
        np.testing.assert_array_equal(examples.x, simulated.x[chosen])
        np.testing.assert_array_equal(examples.y, simulated.y[chosen])


@pytest.mark.parametrize(
    ("delimiter", "encode"),
    [
        (";", lambda text: text.encode("utf-8-sig")),
        (";", lambda text: text.replace("\r\n", "\n").encode("utf-16")),
        ("\t", lambda text: text.replace("\r\n", "\r").encode()),
        (",", lambda text: text.encode()),
    ],
    ids=["semicolons and a mark", "UTF-16", "tabs and CR", "commas"],
)
def test_an_awkward_table_gives_the_same_rows(
    tmp_path: Path, delimiter: str, encode: Callable[[str], bytes]
) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(encode(awkward(table(), delimiter=delimiter)))

    simulated = load("csv", path=path, label="outcome")
    options = device_options(simulated)
    device = read_by_device(path, label="outcome", split="split", **options)

    assert options["classes"] == list(simulated.class_names) == ["died", "no change", "recovered"]
    assert options["categories"] == {"ward": sorted(WARDS)[1:]}
    assert options["standardised"] == ["z"]
    assert simulated.x.shape == (120, 6)
    assert_same(simulated, np.ones(120, np.bool_), device)


@pytest.mark.parametrize("numbers", [["dose"], ["dose", "age"]])
def test_a_device_with_the_rows_of_a_site_has_what_the_site_has(tmp_path: Path, numbers: list[str]) -> None:
    columns = [*numbers, "outcome", "split"]
    rows = [[row[COLUMNS.index(name)] for name in columns] for row in table()]
    sites = [("north", "south", "east")[index % 3] for index in range(len(rows))]
    full = tmp_path / "whole.csv"
    full.write_text(
        awkward([[*row, site] for row, site in zip(rows, sites, strict=True)], [*columns, "site"])
    )
    simulated = load("csv", path=full, label="outcome")

    for site in set(sites):
        own = tmp_path / f"{site}.csv"
        own.write_text(awkward([row for row, each in zip(rows, sites, strict=True) if each == site], columns))
        device = read_by_device(own, label="outcome", split="split", **device_options(simulated))
        assert simulated.site is not None
        assert_same(simulated, simulated.site == simulated.site_names.index(site), device)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("1_000;a;0", "line 3, column 'dose': '1_000' is not a number"),
        ("1e31;a;0", "line 3, column 'dose': '1e31' is too large"),
        ("1;a", "line 3, column 'y': nothing there, the row has 2 values for 3 columns"),
        ("1;a;0;7", "line 3, column 4: '7' is beyond the last column"),
        ('1;"a;0', "line 3: value 2 opens a quote that is never closed"),
        ("1;a;", "line 3, column 'y': the label is empty"),
        ("1;\0;0", "line 3: holds a zero byte"),
    ],
)
def test_both_refuse_a_broken_row_in_the_same_words(tmp_path: Path, cell: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text("dose;ward;y\n1,5;a;0\n" + cell + "\n" + "2;b;1\n" * 40)

    with pytest.raises(DataProblem) as simulated:
        load("csv", path=path, label="y")
    with pytest.raises(DataProblem) as device:
        read_by_device(path, label="y", categories={"ward": ["a", "b"]})

    assert message in str(simulated.value) and message in str(device.value)
