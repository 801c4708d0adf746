"""The data sets we know by name: their sizes, their splits, and what is said when a file is missing or wrong."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.datasets import DataError, Dataset, load, names, preview
from models.datasets.holdout import held_out
from models.labels import PADDING
from tests.support.require import data_dir

MNIST = ("mnist10k-images-idx3-ubyte.gz", "mnist10k-labels-idx1-ubyte.gz")


def test_digits_have_their_published_size() -> None:
    digits = load("digits", seed=1)
    assert digits.x.shape == (1797, 8, 8)
    assert digits.x.dtype == np.float32
    assert digits.x.flags.c_contiguous
    assert (digits.x.min(), digits.x.max()) == (0.0, 1.0)
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert digits.test.sum() == 359


def test_the_seed_decides_what_is_held_out_and_nothing_else() -> None:
    one, again, other = load("digits", seed=1), load("digits", seed=1), load("digits", seed=2)
    assert one.fingerprint() == again.fingerprint()
    assert (one.test != other.test).any()
    assert np.array_equal(one.x, other.x)
    assert np.array_equal(one.y, other.y)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=80),
    st.integers(0, 2**32),
)
def test_a_fifth_of_each_site_is_held_out_and_never_its_last_row(
    rows: list[tuple[int, int]], seed: int
) -> None:
    site, y = np.array(rows, np.int32).T
    test = held_out(y, seed, site)
    for one in np.unique(site):
        size = int((site == one).sum())
        assert test[site == one].sum() == min(round(size / 5), size - 1)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=200), st.integers(0, 2**32))
def test_holding_out_is_spread_over_the_classes(labels: list[int], seed: int) -> None:
    y = np.array(labels, np.int32)
    test = held_out(y, seed)
    for label in np.unique(y):
        rows = y == label
        assert abs(test[rows].sum() - rows.sum() * test.sum() / len(y)) < 1
        assert rows.sum() < 2 or not test[rows].all()


def test_mnist_reads_the_ten_thousand_images() -> None:
    mnist = load("mnist", data_dir=data_dir(*MNIST), seed=3)
    assert mnist.x.shape == (10_000, 28, 28)
    assert (mnist.x.min(), mnist.x.max()) == (0.0, 1.0)
    assert np.bincount(mnist.y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.test.sum() == 2000


def test_mnist_keeps_the_standard_split_when_both_halves_are_there(tmp_path: Path) -> None:
    write_mnist(tmp_path, "train", images(7))
    write_mnist(tmp_path, "t10k", images(3), compress=False)
    mnist = load("mnist", data_dir=tmp_path)
    assert mnist.test.tolist() == [False] * 7 + [True] * 3
    assert np.allclose(mnist.x[:7] * 255, images(7))


def test_mnist_with_training_images_alone_holds_out_a_fifth(tmp_path: Path) -> None:
    write_mnist(tmp_path, "train", images(10))
    assert load("mnist", data_dir=tmp_path).test.sum() == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], r"7,839 bytes of data, expected 7,840 \(10 x 28 x 28 by its header\)"),
        (lambda raw: raw + b"\0", "7,841 bytes of data, expected 7,840"),
        (lambda raw: raw[:9], "ends after 9 bytes, inside its header of 16"),
        (lambda raw: b"", "starts with nothing, expected 00 00 08 03"),
        (lambda raw: b"<html>not found</html>", "starts with 3c 68 74 6d, expected 00 00 08 03"),
        (lambda raw: b"\0\0\x0d\x03" + raw[4:], "starts with 00 00 0d 03"),
        (lambda raw: gzip.compress(raw)[:-20], "damaged gzip file"),
        (lambda raw: b"\x1f\x8bgarbage" + raw, "damaged gzip file"),
    ],
)
def test_damaged_idx_file_is_named_with_what_was_expected(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_mnist(tmp_path, "train", images(10), compress=False)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", data_dir=tmp_path)
    assert str(path) in str(caught.value)


def test_mnist_labels_must_fit_the_images(tmp_path: Path) -> None:
    write_mnist(tmp_path, "train", images(10))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(9, np.uint8)))
    with pytest.raises(DataError, match="9 labels for 10 images"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(idx(np.full(10, 11, np.uint8)))
    with pytest.raises(DataError, match="label 11 at row 0, expected 0 to 9"):
        load("mnist", data_dir=tmp_path)


def test_shakespeare_has_a_client_for_each_of_its_309_speakers() -> None:
    plays = load("shakespeare", data_dir=data_dir("tinyshakespeare.txt"))
    assert (len(plays.site_names), plays.classes, plays.task) == (309, 65, "next_token")
    assert plays.site is not None
    assert np.bincount(plays.site[~plays.test], minlength=309).min() >= 1
    assert plays.x.shape == plays.y.shape == (len(plays.x), 32)
    assert (plays.y != PADDING).any(axis=1).all()
    assert plays.x.min() == 0
    assert plays.x.max() == 64


def test_shakespeare_windows_spell_out_what_a_speaker_says(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("ANNE:\nabcdef\n\nBOB:\n\nANNE:\ng\n")
    plays = load("shakespeare", data_dir=tmp_path, length=4)
    assert plays.site_names == ("ANNE", "BOB")

    def text(tokens: np.ndarray) -> str:
        return "".join(plays.class_names[token] if token != PADDING else "_" for token in tokens)

    anne = plays.site == 0
    assert [text(row) for row in plays.y[anne]] == ["abcd", "ef\n\n", "g\n__"]
    assert [text(row) for row in plays.x[anne]][:2] == ["\nabc", "def\n"]
    assert plays.test[anne].tolist() == [False, False, True]
    assert [text(row) for row in plays.y[plays.site == 1]] == ["\n___"]


def test_text_that_is_no_play_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text("ANNE:\nWho is there?\n\nNobody speaks this.\n")
    with pytest.raises(
        DataError, match=r"line 4: 'Nobody speaks this\.' begins a block, expected `SPEAKER:`"
    ):
        load("shakespeare", data_dir=tmp_path)
    path.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        load("shakespeare", data_dir=tmp_path)


def test_phrasebank_has_its_4846_sentences() -> None:
    bank = load("phrasebank", data_dir=data_dir("financial_phrasebank.csv"), seed=4)
    counts = dict(zip(bank.class_names, np.bincount(bank.y).tolist(), strict=True))
    assert counts == {"negative": 604, "neutral": 2879, "positive": 1363}
    assert bank.x.shape == (4846, 32)
    assert bank.x.dtype == np.int32
    assert (bank.x.min(), bank.x.max()) == (0, 2047)
    assert (bank.x[:, 0] != 0).all()


def test_phrasebank_words_are_numbered_by_frequency_in_the_training_rows(tmp_path: Path) -> None:
    training = "neutral,the the the Profit\npositive,the profit rose\n" * 5
    (tmp_path / "financial_phrasebank.csv").write_text("Sentiment,News Headline\n" + training)
    bank = load("phrasebank", data_dir=tmp_path, length=4, vocab=4)
    expected = {"neutral": [2, 2, 2, 3], "positive": [2, 3, 1, 0]}
    for row, label in zip(bank.x, bank.y, strict=True):
        assert row.tolist() == expected[bank.class_names[label]]


def test_phrasebank_with_another_sentiment_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "financial_phrasebank.csv").write_text("Sentiment,News Headline\nneutral,a\npositiv,b\n")
    with pytest.raises(DataError, match=r"line 3, column 'Sentiment': 'positiv' .* did you mean 'positive'"):
        load("phrasebank", data_dir=tmp_path)


def test_synthetic_serves_each_client_its_samples() -> None:
    made = load("synthetic(shape=[3, 4], classes=5, samples=6)", clients=7, seed=1)
    assert made.x.shape == (52, 3, 4)
    assert (~made.test).sum() == 42
    assert np.bincount(made.y).tolist() == [11, 11, 10, 10, 10]
    assert (
        load("synthetic(shape=[3, 4], classes=5, samples=6)", clients=7, seed=1).fingerprint()
        == made.fingerprint()
    )
    assert load("synthetic", seed=1).input_shape == (784,)


@pytest.mark.parametrize("shape", ["[4]", "[784]"])
def test_synthetic_can_be_learnt(shape: str) -> None:
    made = load(f"synthetic(shape={shape}, classes=4, samples=50)", clients=8, seed=2)
    x, y = made.x[~made.test], made.y[~made.test]
    means = np.stack([x[y == label].mean(axis=0) for label in range(4)])
    guess = ((made.x[made.test][:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (guess == made.y[made.test]).mean() > 0.8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", "'mnits' is unknown, did you mean 'mnist'"),
        ("Digits", "did you mean 'digits'"),
        ("nonsense", "known: digits, mnist, shakespeare"),
        ("digits(3)", "takes no options"),
        ("synthetic(clases=3)", "no option 'clases', did you mean 'classes'"),
        ("synthetic(classes=1)", "classes = 1, expected a whole number from 2"),
        ("synthetic(shape=784)", r"shape = 784, expected a list"),
        ("synthetic(shape=[0])", r"shape = \[0\]"),
        ("synthetic(10)", r"expected synthetic\(alpha, beta\), two numbers"),
        ("synthetic(1, -1)", r"expected synthetic\(alpha, beta\), two numbers"),
        ("synthetic(1, 1, classes=3)", r"expected synthetic\(alpha, beta\), two numbers"),
        ("synthetic(shape=__import__('os'))", "not of the form"),
        ("synthetic(", "not of the form"),
        ("my module:load", "not of the form package.module:function"),
    ],
)
def test_bad_name_is_refused_before_anything_is_read(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        names.check_name(name)
    with pytest.raises(DataError, match=message):
        load(name)


def test_clients_of_synthetic_differ_by_alpha_and_beta() -> None:
    alike, unlike = (
        load(f"synthetic({alpha}, {beta})", clients=12, seed=3) for alpha, beta in ((0, 0), (1, 100))
    )

    def centres(data: Dataset) -> np.ndarray:
        return np.array([data.x[data.site == site].mean() for site in range(12)])

    assert np.std(centres(alike)) < 0.3 < 3 < np.std(centres(unlike))
    for data in (alike, unlike):
        assert (data.input_shape, data.classes, data.input_dtype) == ((60,), 10, "float32")
        rows = np.bincount(data.site)
        assert rows.min() >= 50 and rows.max() > 4 * np.median(rows)
        held_out = np.bincount(data.site[data.test], minlength=12)
        assert (held_out == rows // 10).all()
    again = load("synthetic(1, 100)", clients=12, seed=3)
    assert again.fingerprint() == unlike.fingerprint()
    deviations = unlike.x[unlike.site == int(np.bincount(unlike.site).argmax())].std(axis=0)
    np.testing.assert_allclose(deviations, np.arange(1, 61) ** -0.6, rtol=0.1)


def test_synthetic_beyond_memory_is_refused() -> None:
    with pytest.raises(DataError, match="GiB"):
        load("synthetic(shape=[1000000000])")


@pytest.mark.parametrize("name", ["mnist", "shakespeare", "phrasebank"])
def test_missing_file_says_where_it_was_looked_for_and_what_to_set(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError) as caught:
        load(name, data_dir=tmp_path)
    for part in (str(tmp_path), "https://", "--data-dir", "FEDLOOP_DATA_DIR"):
        assert part in str(caught.value)


def test_preview_says_what_was_understood() -> None:
    lines = preview(load("digits"))
    assert lines[0] == "digits: 1,797 rows, 1,438 for training and 359 held out"
    assert lines[1] == "inputs: 8 x 8 numbers a row"
    assert lines[2].startswith("10 classes: 0 178, 1 182")
    assert "no sites" in lines[3]


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    ours, theirs = load("digits"), load_digits()
    np.testing.assert_array_equal(ours.x, (theirs.images / 16).astype(np.float32), strict=True)
    np.testing.assert_array_equal(ours.y, theirs.target)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 28, 28)).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, prefix: str, x: np.ndarray, compress: bool = True) -> None:
    labels = (np.arange(len(x)) % 10).astype(np.uint8)
    for name, array in (("images-idx3", x), ("labels-idx1", labels)):
        content = gzip.compress(idx(array)) if compress else idx(array)
        (folder / f"{prefix}-{name}-ubyte{'.gz' if compress else ''}").write_bytes(content)
