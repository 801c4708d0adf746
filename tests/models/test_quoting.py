"""What error messages show of a file that is no data: a little on its own machine, nothing to who asks over the API."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from edge_client.data.quoting import MAX_CHARACTERS, content_hidden
from models.datasets import DataError, load

SECRET = "s3cr3t"
TABLES = {
    "no label": f"root:{SECRET}:20228\nnobody:{SECRET}:1\n",
    "a name twice": f"label,{SECRET},{SECRET}\n1,2,3\n",
    "too many values": f"label,x\n1,2,{SECRET}\n",
    "too few values": f"label,x,{SECRET}\n1,2\n",
    "an open quote": f'label,x\n1,"{SECRET}\n',
    "a quote within": f'label,x\n1,"{SECRET}"x\n2,3\n',
    "no number": "label,x\n" + "".join(f"{n % 2},{n}\n" for n in range(30)) + f"1,{SECRET}\n",
    "too large": f"label,{SECRET}\n" + "".join(f"{n % 2},{n}\n" for n in range(30)) + "1,1e99\n",
    "many texts": "label,x\n" + "".join(f"{n % 2},{SECRET}{n}\n" for n in range(200)),
    "one label": f"label,x\n{SECRET},1\n{SECRET},2\n",
    "a label a row": "label,x\n" + "".join(f"{SECRET}{n},{n}\n" for n in range(30)),
    "no feature": f"label\n{SECRET}\nother\n",
    "a split": f"label,x,split\n1,2,{SECRET}\n2,3,train\n",
    "bytes": f"label,x\n1,{SECRET}\xe9\n",
    "a zero": f"label,{SECRET}\0\n",
    "an empty label": f"label,{SECRET}\n,1\n",
}
FILES = {
    "shakespeare": ("tinyshakespeare.txt", f"{SECRET} and no speaker\n\nmore\n".encode()),
    "phrasebank": (
        "financial_phrasebank.csv",
        f"Sentiment,News Headline\n{SECRET},words\n".encode(),
    ),
    "mnist": ("train-images-idx3-ubyte", SECRET.encode()),
    "mnist, gzipped": ("train-images-idx3-ubyte.gz", gzip.compress(SECRET.encode())),
}


def message(**arguments: object) -> str:
    with pytest.raises(DataError) as raised:
        load(**arguments)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_not_quoted_where_content_is_hidden(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(TABLES[kind].encode("latin-1"))
    shown = message(name="csv", path=path)
    with content_hidden():
        hidden = message(name="csv", path=path)
    assert str(path) in shown and str(path) in hidden
    assert not [text for text in (SECRET, "20228", "0xe9") if text in hidden]
    assert message(name="csv", path=path) == shown


@pytest.mark.parametrize("kind", FILES)
def test_files_of_known_data_sets_are_not_quoted_either(tmp_path: Path, kind: str) -> None:
    name, content = FILES[kind]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"")
    with content_hidden():
        hidden = message(name=kind.partition(",")[0], data_dir=tmp_path)
    assert SECRET not in hidden and SECRET[:4].encode().hex(" ") not in hidden


def test_on_its_own_machine_a_message_shows_what_is_wrong_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TABLES["no number"])
    assert f"{SECRET!r} is not a number" in message(name="csv", path=path)
    path.write_text(",".join(f"column{n}{'x' * 200}" for n in range(1000)) + "\n" + "1," * 999 + "1\n")
    result = message(name="csv", path=path)
    assert "column0xx" in result and "column30" not in result
    assert len(result) < 25 * (MAX_CHARACTERS + 2) + len(str(path)) + 200
