"""A table as spreadsheets leave it: quoted separators, decimal commas, missing values, an id, dates and rare texts."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path

import numpy as np

COLUMNS = ["patient", "age", "dose", "ward", "code", "admitted", "site", "split", "outcome"]
WARDS = ["Chirurgie; Süd", 'intensive "ICU"', "Innere | 2", "Kinder"]
SITES = ["nord", "süd", "ost", "west"]
RAREST = "once only"
OLDEST = "119"


def awkward_rows(count: int = 480) -> list[list[str]]:
    rng = np.random.default_rng(4)
    rows = []
    for row in range(count):
        dose = "" if row % 9 == 0 else f"{rng.normal(1000, 300):.3f}".replace(".", ",")
        code = f"C{int(rng.zipf(1.3)) % 3000:04d}"
        date = (
            f"{int(rng.integers(1, 29)):02d}.{int(rng.integers(1, 13)):02d}.{int(rng.integers(2015, 2024))}"
        )
        outcome = ("genesen", "verstorben", "unverändert")[int(rng.integers(3))]
        split = "test" if row % 5 == 0 else "train"
        age, ward, site = str(int(rng.integers(20, 90))), WARDS[int(rng.integers(4))], SITES[row % 4]
        rows.append([f"P{row:06d}", age, dose, ward, code, date, site, split, outcome])
    rows[1][COLUMNS.index("code")], rows[1][COLUMNS.index("age")] = RAREST, OLDEST
    return rows


def write(path: Path, rows: list[list[str]], columns: list[str], encoding: str, delimiter: str) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(columns)
    writer.writerows([row[COLUMNS.index(name)] for name in columns] for row in rows)
    path.write_bytes(text.getvalue().encode(encoding))
    return path


SECRETS = {"dose": 54321.987, "admitted": -44561.0}
"""What the table of `many_codes` holds in one training row each: the largest dose, and the earliest date in days since 1970."""
SECRET_CELLS = ("54321,987", "54321.987", "31.12.1847", "1847-12-31")
"""The same in text: the table's own and the usual other one."""


RARE_SPELLING = "prüfung/0100"
"""How the table of `many_codes` spells in one training row a code that another row has with a capital."""


def many_codes(count: int = 4200, codes: int = 3000) -> list[list[str]]:
    """The table with that many codes, most of them in one row only, two extremes, and an outcome that can be learned."""
    rows = awkward_rows(count)
    age, code, outcome = (COLUMNS.index(name) for name in ("age", "code", "outcome"))
    for number, row in enumerate(rows):
        row[code] = f"Prüfung/{number if number < codes else number % 40:04d}"
        row[outcome] = (
            "genesen" if int(row[age]) < 45 else "unverändert" if int(row[age]) < 65 else "verstorben"
        )
    rows[104][code] = RARE_SPELLING
    rows[4][COLUMNS.index("dose")], rows[8][COLUMNS.index("admitted")] = SECRET_CELLS[0], SECRET_CELLS[2]
    return rows


def rare_texts(rows: list[list[str]], below: int = 10) -> list[str]:
    """Patients, and codes that fewer training rows have than the minimum count."""
    counts = Counter(row[COLUMNS.index("code")] for row in rows if _trains(row))
    rare = [code for row in rows if counts[code := row[COLUMNS.index("code")]] < below]
    return [*(row[COLUMNS.index("patient")] for row in rows), *dict.fromkeys(rare)]


def _trains(row: list[str]) -> bool:
    return row[COLUMNS.index("split")] == "train"
