"""Token files: texts on disk as ids and document boundaries, checked, and mapped."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.serving import texts
from edge_client.wire.preprocessing import TextSchema
from models.datasets.dataset import DataError
from models.datasets.token_files import directory, documents, tokenizers, writing
from models.datasets.token_files.directory import TokenDirectory, open_directory
from models.datasets.token_files.documents import Documents
from models.datasets.token_files.packing import pack
from models.job import JobError, JobFile
from models.labels import PADDING
from models.pretrain.data import token_directory
from models.pretrain.data.batches import BatchRandom
from models.pretrain.data.token_directory import PackedDocuments
from tests.support.long import extended

PLAYS = [
    f"Enter {who}.\nTo be, or not to be: line {n}.\n" for n in range(100) for who in ("HAMLET", "Ophelia")
]


def lines(folder: Path, documents: Sequence[str] = PLAYS) -> Path:
    path = folder / "plays.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def make(folder: Path, inputs: Documents, encoding: str = "bytes", share: float = 0.2) -> TokenDirectory:
    """A directory of token files in `folder`/tokens."""
    kind, _, size = encoding.rstrip(")").partition("(")

    def pieces() -> list[str]:
        return [piece.text for piece in inputs.pieces()]

    tokenizer = tokenizers.learn(kind, int(size or 0), pieces, pieces)
    (folder / "tokens").mkdir()
    writing.write(folder / "tokens", tokenizer, writing.assigned(inputs, share))
    return open_directory(folder / "tokens")


def decoded(found: TokenDirectory, split: directory.Split) -> list[str]:
    """The documents of a split, each without its end."""
    document = found.text()
    assert document is not None
    merges, vocabulary = (tuple(document[key]) for key in ("merges", "vocabulary"))
    schema = TextSchema(**{**document, "merges": merges, "vocabulary": vocabulary})
    tokens, ends = found.tokens(split), found.documents(split)
    parts = [tokens[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]
    assert all(part[-1] == found.header.end_of_document == schema.end for part in parts)
    return [texts.decode(part.tolist(), schema) for part in parts]


@pytest.mark.parametrize("encoding", ["bytes", "characters", "bpe(300)"])
def test_token_files_are_the_documents(tmp_path: Path, encoding: str) -> None:
    """Every character of these occurs often enough to have a name."""
    found = make(tmp_path, Documents([lines(tmp_path)]), encoding)
    train, test = decoded(found, "train"), decoded(found, "test")
    assert sorted([*train, *test]) == sorted(PLAYS)
    assert train == [text for text in PLAYS if text in set(train)]
    assert 20 <= len(test) <= 60  # of 200, a fifth each
    header = found.header
    assert (header.train.documents, header.test.documents) == (len(train), len(test))
    assert header.train.characters + header.test.characters == sum(map(len, PLAYS))
    assert header.dtype == "uint16"
    assert found.verify()


def test_equal_documents_are_in_one_split_whatever_the_order(tmp_path: Path) -> None:
    sides: list[dict[str, str]] = []
    for number, given_documents in enumerate((PLAYS, [*reversed(PLAYS), PLAYS[3], PLAYS[3]])):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = make(folder, Documents([lines(folder, given_documents)]))
        sides.append({text: split for split in directory.SPLITS for text in decoded(found, split)})
        assert not set(decoded(found, "train")) & set(decoded(found, "test"))
    assert sides[0] == sides[1]


@pytest.mark.parametrize("layout", ["file", "line", "jsonl"])
@pytest.mark.parametrize("zipped", [False, True])
def test_every_layout_gives_its_documents(tmp_path: Path, layout: documents.Layout, zipped: bool) -> None:
    written = {
        "file": "first\r\nsecond\n",
        "line": "first\r\n\nsecond\nthird",
        "jsonl": '{"id": 1, "body": "first\\n"}\n\n{"body": ""}\n{"body": "second"}\n',
    }[layout]
    path = tmp_path / ("in.txt.gz" if zipped else "in.txt")
    path.write_bytes(gzip.compress(written.encode()) if zipped else written.encode())
    read: list[int] = []
    found = [piece.text for piece in Documents([path], layout, "body").pieces(read.append)]
    assert (
        found
        == {"file": [written], "line": ["first", "second", "third"], "jsonl": ["first\n", "second"]}[layout]
    )
    assert read[-1] == path.stat().st_size


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60), read=st.integers(1, 9))
def test_a_long_file_is_one_document_in_pieces(
    text: str, read: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("long") / "in.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_READ_BYTES", read)
        pieces = list(Documents([path]).pieces())
    assert "".join(piece.text for piece in pieces) == text
    count = len(pieces)
    assert [(piece.first, piece.last) for piece in pieces] == [(n == 0, n == count - 1) for n in range(count)]
    assert all(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("content", "layout", "message"),
    [
        (b"caf\xe9", "file", r"in.txt: not UTF-8 text at byte 3"),
        (b"ab\ncaf\xe9\n", "line", r"in.txt, line 2: not UTF-8 text at byte 3"),
        (b"plain\n", "jsonl", r"in.txt, line 1: is not JSON; of plain text use --documents file or line"),
        (b'{"body": "x"}\n', "jsonl", r"line 1: has no text under 'text': it is dict with 'body'; name the key with --text-key"),
        (b"[1]\n", "jsonl", r"line 1: has no text under 'text': it is list"),
        (b'{"text": "\\ud800"}\n', "jsonl", r"line 1: has half a surrogate pair"),
        (b"\n\n", "line", r"the inputs have no document with text"),
        (b"one\n", "line", r"none of the 1 documents went to the test split"),
    ],
)  # fmt: skip
def test_inputs_that_are_no_documents_are_refused(
    tmp_path: Path, content: bytes, layout: documents.Layout, message: str
) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        make(tmp_path, Documents([tmp_path / "in.txt"], layout), share=1e-6)


def test_folders_are_read_and_missing_inputs_named(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a.jsonl.gz", "c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert documents.find([tmp_path]) == [tmp_path / "a.jsonl.gz", tmp_path / "b" / "two.txt"]
    with pytest.raises(DataError, match=r"none: there is no such file or folder"):
        documents.find([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: has no file that ends in .txt, .jsonl, .ndjson"):
        documents.find([tmp_path / "empty"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return make(folder, Documents([lines(folder)])).path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy"


def test_files_are_read_once_and_again_when_they_were_touched(copy: Path) -> None:
    found = open_directory(copy)
    assert found.verify()
    assert not found.verify()
    assert not open_directory(copy, found.header.sha256).verify()
    moved = copy.rename(copy.with_name("moved"))
    assert not open_directory(moved).verify()
    again = shutil.copytree(moved, copy)
    assert open_directory(again).verify()
    content = (again / "test.tokens").read_bytes()
    (again / "test.tokens").write_bytes(content)
    assert open_directory(again).verify()


def test_a_changed_byte_is_found_and_its_file_named(copy: Path) -> None:
    assert open_directory(copy).verify()
    for name in ("train.tokens", "test.documents", "text.json"):
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} is damaged: its SHA-256 is not the one in header.json"):
            open_directory(copy).verify()
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
    assert open_directory(copy).verify()


def rewrite(folder: Path, change: Mapping[str, Any]) -> None:
    """The header with other values and a SHA-256 that fits them; files as they are on disk."""
    header = open_directory(folder).header
    files = {}
    for name in header.files:
        content = (folder / name).read_bytes()
        files[name] = directory.Stored(len(content), directory.hashlib.sha256(content).hexdigest())
    (folder / directory.HEADER).write_text(replace(header, files=files, **change).to_json())


def test_content_that_contradicts_the_header_is_refused(copy: Path) -> None:
    tokens = np.memmap(copy / "train.tokens", "<u2", "r+")
    before = int(tokens[0])
    tokens[0] = 300
    tokens.flush()
    rewrite(copy, {})
    with pytest.raises(DataError, match=r"train.tokens has token 300, expected ids from 0 to 256"):
        open_directory(copy).verify()
    tokens[0] = 256
    tokens.flush()
    rewrite(copy, {})
    with pytest.raises(
        DataError, match=r"train.documents has \d+ boundaries, but \d+ documents end in train.tokens"
    ):
        open_directory(copy).verify()
    tokens[0] = before
    tokens.flush()
    ends = np.memmap(copy / "train.documents", "<i8", "r+")
    ends[2] += 1
    ends.flush()
    rewrite(copy, {})
    with pytest.raises(
        DataError, match=r"train.documents has boundaries where no document of train.tokens ends"
    ):
        open_directory(copy).verify()


def test_a_directory_that_is_none_is_refused_before_its_files_are_read(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none: is no directory of token files: header.json: No such file"):
        open_directory(tmp_path / "none")
    with pytest.raises(DataError, match=r"was replaced: its SHA-256 is .*, expected 000000000000…"):
        open_directory(copy, "0" * 64)
    text = (copy / "header.json").read_text()
    for wrong, message in (
        (text.replace('"version": 1', '"version": 2'), r"version 2; this software reads 'fedloop-tokens', version 1"),
        ("[]", r"is no header of token files"),
        (text[:-9], r"is no header of token files"),
        (text.replace('"vocabulary": 257', '"vocabulary": 999'), r"is damaged: its content does not have the SHA-256"),
        (text.replace('"vocabulary": 257', '"vocabulary": "x"'), r"is damaged: .*vocabulary is 'x', expected"),
        (text.replace('"dtype": "uint16"', '"dtype": "int8"'), r"is damaged: .*dtype is 'int8'"),
    ):  # fmt: skip
        (copy / "header.json").write_text(wrong)
        with pytest.raises(DataError, match=message):
            open_directory(copy)
    (copy / "header.json").write_text(text)
    (copy / "train.tokens").write_bytes((copy / "train.tokens").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train.tokens is damaged: it has [\d,]+ bytes, expected [\d,]+"):
        open_directory(copy)
    (copy / "train.tokens").unlink()
    with pytest.raises(
        DataError, match=r"train.tokens: No such file or directory; the directory is incomplete"
    ):
        open_directory(copy)


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    def encode(given_texts: Sequence[str]) -> Any:
        return (np.array([70_000, 1], np.int64) for _ in given_texts)

    tokenizer = tokenizers.Tokenizer("made up", 70_001, 0, encode, TextSchema("bytes", "next_token"))
    (tmp_path / "tokens").mkdir()
    writing.write(tmp_path / "tokens", tokenizer, writing.assigned(Documents([lines(tmp_path)]), 0.2))
    found = open_directory(tmp_path / "tokens")
    assert found.verify()
    assert found.tokens("train")[:3].tolist() == [70_000, 1, 0]
    assert found.header.dtype == "uint32"


def tokenizer_file(folder: Path, change: Mapping[str, Any] | None = None, special: str = "</s>") -> Path:
    """A tokenizer.json of 300 byte-level pairs with one special token."""
    from tokenizers import Tokenizer

    made = tokenizers.learn("bpe", 300, lambda: PLAYS, lambda: PLAYS)
    tokenizer = Tokenizer.from_str(made.tokenizer)
    tokenizer.add_special_tokens([special])
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(tokenizer.to_str()), **(change or {})}))
    return path


SPLIT = {"type": "Split", "pattern": {"Regex": r"\\p{L}+|\\s+"}, "behavior": "Isolated", "invert": False}
QWEN = {
    "type": "Sequence",
    "pretokenizers": [
        SPLIT,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


@pytest.mark.parametrize("change", [{}, {"normalizer": {"type": "Lowercase"}}, {"pre_tokenizer": QWEN}])
def test_a_tokenizer_json_of_any_kind_reads_texts_everywhere(
    tmp_path: Path, change: Mapping[str, Any]
) -> None:
    found = tokenizers.read(tokenizer_file(tmp_path, change), vocabulary=512)
    text = "to be, or not\n\n  äö"
    (ids,) = found.encode([text])
    assert (found.vocabulary, found.text.end) == (512, found.end_of_document)
    assert texts.token_ids([text], found.text, "a text") == [ids.tolist()]
    assert texts.decode(ids.tolist(), found.text) == text


def test_the_name_of_a_special_token_is_text_in_a_document(tmp_path: Path) -> None:
    found = tokenizers.read(tokenizer_file(tmp_path))
    (ids,) = found.encode(["or </s> not"])
    assert found.end_of_document not in ids
    assert texts.decode(ids.tolist(), found.text) == "or </s> not"
    assert found.end_of_document in texts.token_ids(["or </s> not"], found.text, "a prompt")[0]


def test_documents_begin_with_the_special_tokens_that_begin_texts(tmp_path: Path) -> None:
    """And nothing of the file that cuts or fills up texts applies to them."""
    begins = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    ids = tokenizers.read(tokenizer_file(tmp_path))
    change = {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begins, {"Sequence": {"id": "A", "type_id": 0}}, begins],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [ids.end_of_document], "tokens": ["</s>"]}},
        },
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    }
    tokenizer = tokenizers.read(tokenizer_file(tmp_path, change))
    (tmp_path / "tokens").mkdir()
    writing.write(tmp_path / "tokens", tokenizer, writing.assigned(Documents([lines(tmp_path)]), 0.2))
    found, end = open_directory(tmp_path / "tokens"), tokenizer.end_of_document
    first = found.tokens("train")[: found.documents("train")[0]].tolist()
    assert first == [end, *next(iter(ids.encode([PLAYS[0]]))).tolist(), end]
    assert first == texts.token_ids([PLAYS[0]], tokenizer.text, "a text")[0]


def test_pairs_have_room_for_the_end_of_documents() -> None:
    with pytest.raises(DataError, match=r"encoding bpe\(257\): expected bpe\(258\) or more"):
        tokenizers.learn("bpe", 257, lambda: PLAYS, lambda: PLAYS)
    assert tokenizers.learn("bpe", 258, lambda: PLAYS, lambda: PLAYS).vocabulary == 258


def test_a_wrong_tokenizer_json_is_refused(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path, special="<fin>")
    with pytest.raises(
        DataError, match=r"has none of <\|endoftext\|>, .*; name the token that ends a document"
    ):
        tokenizers.read(path)
    with pytest.raises(DataError, match=r"has no token 'nope'"):
        tokenizers.read(path, "nope")
    ids = tokenizers.read(path, "<fin>").vocabulary
    with pytest.raises(
        DataError, match=rf"has ids up to {ids - 1}, expected a --vocabulary of {ids} or more, got 7"
    ):
        tokenizers.read(path, "<fin>", 7)
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: is no tokenizer.json"):
        tokenizers.read(path)


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), length=st.integers(1, 30))
def test_windows_hold_whole_documents_and_count_every_label_once(
    sizes: list[int], length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    end = 9
    ends = np.cumsum(sizes)
    tokens = np.arange(ends[-1], dtype=np.uint16) % end
    tokens[ends - 1] = end
    path = tmp_path_factory.mktemp("packed") / "index.npy"
    count = pack(ends, length, path)
    index = np.load(path)
    windows = PackedDocuments(tokens, index, length, end)
    assert len(windows) == count
    starts = index[:, 0]
    assert starts[0] == 0 and starts[-1] == ends[-1]
    assert (np.diff(starts) <= length).all() and (np.diff(starts) > 0).all()
    cut = set(starts[1:].tolist()) - set(ends.tolist())
    for place in cut:  # only of a document that is longer than a window
        document = int(np.searchsorted(ends, place, side="right"))
        assert sizes[document] > length
    rows = np.arange(count)
    x, y = windows.read(rows)
    assert windows.counted(rows) == (y != PADDING).sum() == len(tokens) - len(sizes)
    assert [windows.counted(rows[n : n + 1]) for n in rows] == (y != PADDING).sum(1).tolist()
    labels = {
        (int(starts[row]) + at, int(y[row, at])) for row, at in zip(*np.nonzero(y != PADDING), strict=True)
    }
    inner = [place for place in range(len(tokens)) if place + 1 not in {0, *ends.tolist()}]
    assert labels == {(place, int(tokens[place + 1])) for place in inner}
    assert all(
        x[row, : starts[row + 1] - starts[row]].tolist() == tokens[starts[row] : starts[row + 1]].tolist()
        for row in rows
    )


def job(made: Path, **tokens: Any) -> JobFile:
    header = open_directory(made).header
    table = {
        "directory": str(made),
        "end_of_document": header.end_of_document,
        "sha256": header.sha256,
        **tokens,
    }
    return JobFile(made / "job.json", {"tokens": table})


def test_training_windows_are_the_concatenated_documents(made: Path) -> None:
    train, test = token_directory.load(job(made, test_rows=3), 16, 257)
    found = open_directory(made)
    rows = np.arange(len(train))
    x, y = train.read(rows, BatchRandom(np.random.default_rng(0), len(rows), rows))
    assert x.ravel().tolist() == found.tokens("train")[: x.size].tolist()
    assert y.ravel().tolist() == found.tokens("train")[1 : x.size + 1].tolist()
    whole = (found.header.test.tokens - 1) // 16
    assert len(test) == 3
    x, _ = test.read(np.arange(3), BatchRandom(np.random.default_rng(0), 3, np.arange(3)))
    expected = [found.tokens("test")[16 * (n * whole // 3) :][:16].tolist() for n in range(3)]
    assert x.tolist() == expected


def test_token_files_for_another_model_are_refused(made: Path) -> None:
    with pytest.raises(JobError, match=r"has token ids from 0 to 256, but the model knows 100"):
        token_directory.load(job(made), 16, 100)
    with pytest.raises(JobError, match=r"tokens, expected more than the 100,000 of one window"):
        token_directory.load(job(made), 100_000, 257)
    with pytest.raises(DataError, match=r"was replaced"):
        token_directory.load(job(made, sha256="1" * 64), 16, 257)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [8, *extended(64)])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, megabytes: int) -> None:
    """Of tokenising, checking, packing and reading; the peak of Python's and NumPy's own allocations."""
    import tracemalloc

    line = json.dumps({"text": "To be, or not to be. " * 40}) + "\n"
    with (tmp_path / "in.jsonl").open("w") as file:
        for number in range(megabytes * 1_000_000 // len(line)):
            file.write(line.replace("To", f"{number} to", 1))
    tracemalloc.start()
    found = make_streaming(tmp_path)
    found.verify()
    pack(found.documents("train"), 64, tmp_path / "index.npy")
    source, _ = token_directory.load(job(found.path), 64, 257)
    source.read(np.arange(0, len(source), 1000), BatchRandom(np.random.default_rng(0), 1, np.arange(1)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert asdict(found.header.train)["tokens"] > 0.8 * megabytes * 900_000
    assert peak < 40e6


def make_streaming(folder: Path) -> TokenDirectory:
    inputs = Documents([folder / "in.jsonl"])
    (folder / "tokens").mkdir()
    tokenizer = tokenizers.learn("bytes", 0, list, list)
    writing.write(folder / "tokens", tokenizer, writing.assigned(inputs, 0.1))
    return open_directory(folder / "tokens")
