"""A user's own table: what is understood of it, and that every mistake is told with its place."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.datasets import DataError, Dataset, load, preview

ROWS = [[str(i), f"{i * i / 7:.4f}", "f" if i % 3 else "m", "yes" if i % 2 else "no"] for i in range(1, 31)]
HEADER = ["visit", "age", "sex", "label"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "patients.csv"


def text(rows: list[list[str]] = ROWS, header: list[str] = HEADER, delimiter: str = ",") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows([header, *rows])
    return out.getvalue()


def read(path: Path, content: str | bytes, **options: object) -> Dataset:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load("csv", path=path, **options)  # type: ignore[arg-type]


def refused(path: Path, content: str | bytes, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, content, **options)
    assert str(path) in str(caught.value)
    return str(caught.value).removeprefix(str(path))


def test_columns_become_standardised_numbers_and_one_hot_categories(path: Path) -> None:
    table = read(path, text())
    assert table.x.shape == (30, 4)
    assert table.x.dtype == np.float32
    assert table.class_names == ("no", "yes")
    assert table.y.tolist() == [i % 2 for i in range(1, 31)]
    assert np.allclose(table.x[~table.test, :2].mean(axis=0), 0, atol=1e-6)
    assert np.allclose(table.x[~table.test, :2].std(axis=0), 1, atol=1e-6)
    assert table.x[:, 2].tolist() == [float(i % 3 != 0) for i in range(1, 31)]
    assert (table.x[:, 2] + table.x[:, 3] == 1).all()
    assert table.test.sum() == 6


@pytest.mark.parametrize(
    "dress",
    [
        lambda plain: "\ufeff" + plain,
        lambda plain: plain.replace("\r\n", "\n"),
        lambda plain: plain.replace("\r\n", "\r"),
        lambda plain: plain.replace("\r\n", "\r\n\r\n"),
        lambda plain: plain.replace(",", "\t"),
        lambda plain: plain.replace(",", " , "),
        lambda plain: plain.replace(",", ";"),
        lambda plain: plain.replace(",", ";").replace(".", ","),
        lambda plain: plain.encode("utf-16"),
        lambda plain: "".join(f'"{part}"' if part not in ",\r\n" else part for part in _parts(plain)),
    ],
    ids=[
        "bom",
        "lf",
        "cr",
        "blank lines",
        "tab",
        "spaces",
        "semicolon",
        "decimal comma",
        "utf-16",
        "all quoted",
    ],
)
def test_the_same_table_in_another_dress_is_the_same_data(
    path: Path, dress: Callable[[str], str | bytes]
) -> None:
    plain = read(path, text())
    assert read(path, dress(text())).fingerprint() == plain.fingerprint()


def _parts(plain: str) -> list[str]:
    return re.findall(r",|\r\n|[^,\r\n]+", plain)


def test_quoted_newlines_stay_in_their_cell_and_lines_still_count(path: Path) -> None:
    rows = [[*row[:2], row[2] + "\nsecond line", row[3]] for row in ROWS]
    assert read(path, text(rows)).x.shape == (30, 4)
    rows[4][1] = "old"
    # The header is line 1 and each of the four rows above takes two.
    assert refused(path, text(rows)).startswith(", line 10, column 'age': 'old' is not a number")


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8), min_size=12, max_size=40
    )
)
def test_any_text_survives_quoting(tmp_path_factory: pytest.TempPathFactory, cells: list[str]) -> None:
    path = tmp_path_factory.mktemp("csv") / "table.csv"
    rows = [["1", cell, str(index % 2)] for index, cell in enumerate(cells)]
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([["a", "note", "label"], *rows])
    try:
        table = read(path, out.getvalue().encode("utf-8"))
    except DataError as error:
        assert "is not a number" in str(error) or "too large" in str(error)
    else:
        assert len(table.x) == len(cells)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "3,1.2857,m,yes",
            "3,1.2857,m",
            ", line 4, column 'label': nothing there, the row has 3 values for 4 columns",
        ),
        ("3,1.2857,m,yes", "3,1.2857,m,yes,9", ", line 4, column 5: '9' is beyond the last column"),
        ("3,1.2857,m,yes", "3,1,2857,m,yes", ", line 4, column 5: 'yes' is beyond the last column"),
        (
            "3,1.2857,m,yes",
            "3,old,m,yes",
            ", line 4, column 'age': 'old' is not a number, as 29 of the column's 30",
        ),
        ("3,1.2857,m,yes", "3,1e31,m,yes", ", line 4, column 'age': '1e31' is too large"),
        ("3,1.2857,m,yes", "3,inf,m,yes", ", line 4, column 'age': 'inf' is too large"),
        ("3,1.2857,m,yes", "3,1.2857,m,", ", line 4, column 'label': the label is empty"),
        ("3,1.2857,m,yes", '3,1.2857,"m,yes', ", line 4: value 3 opens a quote that is never closed"),
        ("3,1.2857,m,yes", '3,1.2857,"m"m,yes', ", line 4: not valid CSV: ',' expected after '\"'"),
        ("visit,age", "age,age", ", line 1: column name 'age' stands twice, as column 1 and 2"),
        (
            "label",
            "lable",
            ": no column 'label' for the label, did you mean 'lable'?; its columns: visit, age, sex, lable",
        ),
        ("label", "outcome", ": no column 'label' for the label; its columns: visit, age, sex, outcome"),
    ],
)
def test_a_mistake_is_reported_with_its_place(path: Path, old: str, new: str, message: str) -> None:
    assert refused(path, text().replace(old, new, 1)).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ": is empty"),
        ("\n\n", ": is empty"),
        ("a,label\n", ": has column names but no rows"),
        ("label\n0\n1\n0\n", ": no column is left for features"),
        ("a,label\n" + "1,0\n" * 9, ": every label in column 'label' is '0'; expected two classes or more"),
        ("a,label\n1,0\n2,1\n", ": 2 rows are too few to hold any out"),
        ("a,label\n" + "".join(f"{i},{i / 3}\n" for i in range(12)), ": column 'label' has 12 different values in 12 rows"),
        ("a,label\nx\0,1\n", ", line 2: holds a zero byte"),
        (b"name,label\nAda,1\nJos\xe9,0\n", ", line 3, column 4: byte 0xe9 is not UTF-8"),
        (b"\xef\xbb\xbfn\xc3\xa4me\xe9,label\n", ", line 1, column 5: byte 0xe9 is not UTF-8"),
        (b"PK\x03\x04\x14\x00\x06\xb5\x00", ", line 1, column 8: byte 0xb5 is not UTF-8"),
        (
            "name,label\n" + "".join(f"person {i},{i % 2}\n" for i in range(101)),
            ", line 2, column 'name': 'person 0' is not a number, and 101 different values are too many",
        ),
    ],
)  # fmt: skip
def test_a_table_nothing_can_be_learnt_from_is_refused(
    path: Path, content: str | bytes, message: str
) -> None:
    assert refused(path, content).startswith(message)


def test_all_columns_with_a_problem_are_named_at_once(path: Path) -> None:
    content = text().replace("3,1.2857,m,yes", "3,old,m,")
    broken = refused(path, content)
    assert "line 4, column 'age': 'old' is not a number" in broken
    assert "line 4, column 'label': the label is empty" in broken
    absent = refused(path, text(), label="outcome", site="ward", exclude=["patient"])
    assert [name for name in ("outcome", "ward", "patient") if f"no column '{name}'" in absent] == [
        "outcome",
        "ward",
        "patient",
    ]


def test_one_odd_cell_in_a_small_table_is_a_mistake_and_no_category(path: Path) -> None:
    content = "dose,label\n1,0\n2,1\n3 mg,0\n4,1\n5,0\n"
    assert refused(path, content).startswith(", line 4, column 'dose': '3 mg' is not a number, as 4 of")


def test_a_hundred_categories_are_still_distinguished(path: Path) -> None:
    content = "name,label\n" + "".join(f"person {i % 100},{i % 2}\n" for i in range(200))
    assert read(path, content).x.shape == (200, 100)


def test_empty_numbers_become_the_mean_of_the_sites_training_rows(path: Path) -> None:
    rows = [[site, split, str(value), str(i % 2)] for i, (site, split, value) in enumerate(
        [("a", "train", 1), ("a", "train", 3), ("a", "train", ""), ("a", "test", 50),
         ("b", "train", 100), ("b", "train", 300), ("b", "test", "NA"), ("b", "test", 500)]
    )]  # fmt: skip
    table = read(path, text(rows, ["site", "split", "dose", "label"]))
    # Site a trains on 1, 3 and the filled 2; site b on 100 and 300: deviations 1 and 100.
    assert np.allclose(table.x[:, 0], [-1, 1, 0, 48, -1, 1, 0, 3])
    assert any("Empty numbers are filled" in note and "'dose' (2)" in note for note in table.notes)


def test_a_site_without_a_value_borrows_the_whole_tables_mean(path: Path) -> None:
    rows = [["a", "", "0"], ["a", "", "1"], ["b", "2", "0"], ["b", "4", "1"], ["b", "6", "0"]] * 6
    table = read(path, text(rows, ["site", "dose", "label"]))
    assert (table.x[np.array([row[0] == "a" for row in rows])] == 0).all()


def test_an_empty_category_belongs_to_none(path: Path) -> None:
    table = read(path, text([[*row[:2], "" if row[0] == "5" else row[2], row[3]] for row in ROWS]))
    assert table.x[4, 2:].tolist() == [0, 0]
    assert any("belong to no category" in note for note in table.notes)


def test_each_site_is_standardised_by_itself_and_keeps_a_fifth_for_testing(path: Path) -> None:
    rows = [[f"s{i % 3}", str(i * 10 ** (i % 3)), str(i // 3 % 2)] for i in range(60)]
    table = read(path, text(rows, ["site", "dose", "label"]))
    assert table.site is not None
    assert table.site_names == ("s0", "s1", "s2")
    for site in range(3):
        training = (table.site == site) & ~table.test
        assert training.sum() == 16
        assert abs(table.x[training].mean()) < 1e-6
        assert abs(table.x[training].std() - 1) < 1e-6


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("by_site", [True, False])
def test_standardised_data_is_left_alone(path: Path, by_site: bool, ddof: int) -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(5, 3, 24) + np.repeat([0, 9], 12)
    groups = np.repeat([0, 1], 12) if by_site else np.zeros(24, int)
    for group in np.unique(groups):
        mine = values[groups == group]
        values[groups == group] = (mine - mine.mean()) / mine.std(ddof=ddof)
    rows = [[f"s{i // 12}", repr(float(value)), str(i % 2)] for i, value in enumerate(values)]
    table = read(path, text(rows, ["site", "dose", "label"]))
    assert np.array_equal(table.x[:, 0], values.astype(np.float32))
    assert any("left as they are: dose" in note for note in table.notes)


def test_a_constant_column_is_zero_and_reported(path: Path) -> None:
    table = read(path, text([["0.1", *row[1:]] for row in ROWS]))
    assert (table.x[:, 0] == 0).all()
    assert "Column 'visit' has the same value in every row and says nothing." in preview(table)


def test_a_column_that_counts_the_rows_is_pointed_out(path: Path) -> None:
    assert any("'visit' counts the rows" in line for line in preview(read(path, text())))


def test_the_split_column_decides_what_is_held_out(path: Path) -> None:
    rows = [[row[1], "Test" if i % 4 == 0 else "train", row[3]] for i, row in enumerate(ROWS)]
    table = read(path, text(rows, ["age", "fold", "label"]), split="fold")
    assert table.test.tolist() == [i % 4 == 0 for i in range(30)]
    assert table.x.shape == (30, 1)
    rows[2][1] = "tets"
    message = refused(path, text(rows, ["age", "fold", "label"]), split="fold")
    assert message.startswith(
        ", line 4, column 'fold': 'tets' is neither train nor test, did you mean 'test'?"
    )
    everything = [[row[0], "train", row[2]] for row in rows]
    assert "every row in column 'fold' says train" in refused(
        path, text(everything, ["age", "fold", "label"]), split="fold"
    )


def test_columns_called_site_and_split_are_found_and_can_be_refused(path: Path) -> None:
    rows = [[row[1], f"s{i % 2}", "test" if i % 5 == 0 else "train", row[3]] for i, row in enumerate(ROWS)]
    content = text(rows, ["age", "site", "split", "label"])
    found = read(path, content)
    assert (found.x.shape[1], found.site_names, found.test.sum()) == (1, ("s0", "s1"), 6)
    plain = read(path, content, site="", split="")
    assert (plain.x.shape[1], plain.site) == (5, None)


def test_an_empty_site_is_an_error_with_its_line(path: Path) -> None:
    rows = [["1", "a", "0"], ["2", "", "1"], ["3", "b", "0"]]
    assert refused(path, text(rows, ["x", "site", "label"])).startswith(
        ", line 3, column 'site': the site is empty"
    )


def test_numeric_labels_and_sites_are_ordered_by_value(path: Path) -> None:
    rows = [[str(i), str(i % 11), ["10", "9", "2.0", "2"][i % 4]] for i in range(44)]
    table = read(path, text(rows, ["x", "site", "label"]))
    assert table.class_names == ("2", "9", "10")
    assert table.site_names == tuple(str(site) for site in range(11))


def test_only_the_listed_features_are_used_in_their_order(path: Path) -> None:
    table = read(path, text(), features=["sex", "visit"])
    assert table.x.shape == (30, 3)
    assert set(np.unique(table.x[:, 0])) == {0, 1}
    assert "'sxe' for a feature, did you mean 'sex'" in refused(path, text(), features=["sxe"])
    assert "'label' is the label and cannot be a feature" in refused(path, text(), features=["label"])
    assert "'age' is listed twice" in refused(path, text(), features=["age", "age"])


def test_a_class_without_training_rows_is_reported(path: Path) -> None:
    rows = [[str(i), "test" if i == 3 else "train", "rare" if i == 3 else str(i % 2)] for i in range(20)]
    notes = read(path, text(rows, ["x", "split", "label"])).notes
    assert "Class 'rare' has no training row, so no model can learn it." in notes


def test_a_table_that_is_not_there_is_reported_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        load("csv", path=tmp_path / "absent.csv")
    with pytest.raises(DataError, match="it is a device, expected a regular file"):
        load("csv", path="/dev/zero")
    with pytest.raises(DataError, match="it is a folder, expected a regular file"):
        load("csv", path=tmp_path)
    with pytest.raises(DataError, match="needs `path`"):
        load("csv")
