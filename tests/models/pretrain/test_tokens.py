"""Texts as tokens and back, on disk, in windows, and with some of them hidden."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.datasets import corpus, encodings
from models.datasets.dataset import DataError
from models.job import JobError
from models.labels import PADDING
from models.pretrain.data import tokens
from models.pretrain.data.batches import Arrays, Batches, BatchRandom, Share
from tests.support import require
from tests.support.decoding import decode

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\r\n" * 40
PAIRS = encodings.learn("bpe", TEXT, 300)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_and_pairs_decode_any_text_to_itself(text: str) -> None:
    for encoding in (encodings.learn("bytes", TEXT, 0), PAIRS):
        found = encoding.encode(text)
        assert decode(encoding.as_json(), found) == text
        assert found.dtype == np.int32
        assert all(0 <= token < encoding.vocab for token in found.tolist())


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_characters_decode_their_own_text_to_itself(text: str) -> None:
    encoding = encodings.learn("characters", text, 0)
    assert decode(encoding.as_json(), encoding.encode(text)) == text
    assert encoding.vocab == len(set(text))


def test_pairs_shorten_a_text_and_are_the_same_every_time() -> None:
    assert len(PAIRS.encode(TEXT)) < len(TEXT) / 2
    assert PAIRS.vocab <= 300
    assert encodings.learn("bpe", TEXT, 300).as_json() == PAIRS.as_json()


def test_characters_that_an_encoding_lacks_are_reported() -> None:
    with pytest.raises(DataError, match=r"character 'z' at 1 is none of the 2"):
        encodings.learn("characters", "ab", 0).encode("az")
    with pytest.raises(DataError, match=r"vocab = 256: bpe has an id for each of the 256 bytes"):
        encodings.learn("bpe", TEXT, 256)
    with pytest.raises(DataError, match=r"there is none"):
        encodings.learn("bytes", "", 0)


@pytest.mark.parametrize("kind", encodings.KINDS)
def test_a_prepared_text_is_the_text(kind: encodings.Kind, tmp_path: Path) -> None:
    """Also where it is encoded piece by piece, and carriage returns stay."""
    (tmp_path / "own.txt").write_bytes(TEXT.encode())
    found = corpus.prepare(tmp_path / "own.txt", tmp_path / "a", kind, 300, held_out=0.2)
    described = (tmp_path / "a" / corpus.ENCODING).read_text()
    train, test = (np.load(tmp_path / "a" / name, mmap_mode="r") for name in (corpus.TRAIN, corpus.TEST))
    assert decode(described, np.concatenate([train, test])) == TEXT
    assert (len(train), len(test)) == (found.train, found.test)
    assert found.vocab == encodings.learn(kind, TEXT, 300).vocab
    assert train.dtype == np.uint16
    corpus.prepare(tmp_path / "own.txt", tmp_path / "b", kind, 300, held_out=0.2)
    for name in (corpus.TRAIN, corpus.TEST, corpus.ENCODING):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_pieces_are_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_PIECE", 50)
    text = "short\n" * 20 + "x" * 120 + "\nend"
    pieces = corpus.pieces(text)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 50


@pytest.mark.slow
def test_shakespeare_in_each_encoding(tmp_path: Path) -> None:
    path = corpus.find("shakespeare", require.data_dir("tinyshakespeare.txt"))
    characters = corpus.prepare(path, tmp_path / "characters", "characters")
    pairs = corpus.prepare(path, tmp_path / "bpe", "bpe", 512)
    assert (characters.vocab, characters.train + characters.test) == (65, 1_115_394)
    assert pairs.vocab == 512
    assert pairs.train < characters.train / 1.8


def test_a_text_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin.txt: not UTF-8 text at byte 3"):
        corpus.prepare(tmp_path / "latin.txt", tmp_path)
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(DataError, match=r"1 characters are too few"):
        corpus.prepare(tmp_path / "one.txt", tmp_path)
    with pytest.raises(DataError, match=r"neither 'shakespeare' nor a file"):
        corpus.find(str(tmp_path / "none.txt"))


@given(count=st.integers(2, 200), length=st.integers(1, 20))
def test_windows_label_every_token_with_the_next(count: int, length: int) -> None:
    windows = tokens.Windows(np.arange(count, dtype=np.uint16), length)
    assert len(windows) == (count - 1) // length
    x, y = windows.read(np.arange(len(windows)))
    assert (y == x + 1).all()
    assert x.ravel().tolist() == list(range(len(windows) * length))
    assert windows.counted(np.arange(len(windows))) == y.size


def test_a_file_of_tokens_is_looked_at_before_the_training(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([0, 3, 7, 2], np.uint16))
    assert len(tokens.load(path, 3, 8)) == 1
    with pytest.raises(JobError, match=r"tokens from 0 to 7, expected 0 to 6"):
        tokens.load(path, 3, 7)
    with pytest.raises(JobError, match=r"has 4 tokens, expected more than the 4 of one example"):
        tokens.load(path, 4, 8)
    with pytest.raises(JobError, match=r"does not exist"):
        tokens.load(tmp_path / "none.npy", 4, 8)
    np.save(path, np.zeros((2, 2)))
    with pytest.raises(JobError, match=r"float64 \(2, 2\), expected whole numbers of shape \(tokens,\)"):
        tokens.load(path, 4, 8)


VOCAB = 50


def texts(rows: int = 400, length: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.integers(1, VOCAB, size=(rows, length)).astype(np.int32)
    x[np.arange(length) >= rng.integers(0, length + 1, size=(rows, 1))] = tokens.PAD
    return x


def test_hidden_tokens_are_the_share_of_the_paper_and_their_own_labels() -> None:
    x = texts()
    masked = tokens.Masked(Arrays(x, np.zeros(len(x), np.int32)), VOCAB)
    rows = np.arange(len(x))
    seen, y = masked.read(rows, BatchRandom(np.random.default_rng(1), len(x), rows))
    chosen, real = y != PADDING, x != tokens.PAD
    assert (seen == x)[~chosen].all()
    assert (y == x)[chosen].all()
    assert not (chosen & ~real).any()
    expected = np.where(real.any(1), np.maximum(1, np.rint(real.sum(1) * 0.15)), 0)
    assert chosen.sum(1).tolist() == expected.tolist()
    assert masked.counted(rows) == chosen.sum()
    shares = [(seen == VOCAB)[chosen].mean(), ((seen != x) & (seen != VOCAB))[chosen].mean()]
    # three deviations of a share of some 1,200 tokens; a replacement is the token itself once in 49
    np.testing.assert_allclose(shares, [0.8, 0.1 * 48 / 49], atol=3 * (0.8 * 0.2 / chosen.sum()) ** 0.5)
    assert seen.max() == VOCAB
    assert (seen > tokens.PAD)[real].all()


def test_masked_tokens_do_not_depend_on_the_reader() -> None:
    x = texts(24)
    masked = tokens.Masked(Arrays(x, np.zeros(len(x), np.int32)), VOCAB)
    full = Batches(masked, 16, 3, Share())[1]
    parts = [Batches(masked, 16, 3, Share((1, 2, 1), place))[1] for place in range(3)]
    assert np.concatenate([part.x for part in parts]).tolist() == full.x.tolist()
    assert np.concatenate([part.y for part in parts]).tolist() == full.y.tolist()
    assert {part.counted for part in parts} == {full.counted} == {int((full.y != PADDING).sum())}
    other = Batches(masked, 16, 4, Share())[1]
    assert other.x.tolist() != full.x.tolist()
