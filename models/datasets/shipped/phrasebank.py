"""Financial PhraseBank: 4,846 news sentences, each negative, neutral or positive (Malo et al. 2014)."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.quoting import nearest, quoted
from models.datasets import columns, files
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out

NAME = "financial_phrasebank.csv"
ORIGIN = "https://www.kaggle.com/datasets/ankurzing/sentiment-analysis-for-financial-news"
SENTIMENT, SENTENCE = "Sentiment", "News Headline"
CLASSES = ("negative", "neutral", "positive")

PAD, UNKNOWN, FIRST_WORD = 0, 1, 2

WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")
"""Runs of letters, runs of digits, and every other mark by itself."""


def load(data_dir: Path | None, seed: int, length: int, vocabulary: int) -> Dataset:
    """x [4846, length] word ids below `vocabulary`; a fifth of each class is held out.

    Id 0 fills up short sentences, 1 is any word the vocabulary lacks, the others are the most frequent words of
    the training rows, in that order (by alphabet where equally frequent). Long sentences lose their end.

    Raises:
        DataError: the file is missing or a row has another sentiment.
    """
    path = files.find(data_dir, [NAME], "phrasebank", ORIGIN)
    table = columns.read(path)
    y = _classes(table)
    test = held_out(y, seed)
    sentences = [WORD.findall(sentence.lower()) for sentence in table.cells(SENTENCE, "the sentence")]
    words = _vocabulary(
        [words for words, out in zip(sentences, test.tolist(), strict=True) if not out], vocabulary
    )
    return Dataset(
        name="phrasebank",
        x=_tokens(sentences, words, length),
        y=y,
        test=test,
        classes=len(CLASSES),
        class_names=CLASSES,
        notes=(
            f"Sentences are lower-cased and cut to {length} words; ids 0 to {FIRST_WORD + len(words) - 1}, "
            "0 is padding and 1 a word outside the vocabulary.",
            "20 % of each class is held out, by the seed; the vocabulary is that of the training rows.",
        ),
    )


def _classes(table: columns.TextTable) -> npt.NDArray[np.int32]:
    cells = table.cells(SENTIMENT, "the label")
    for row, cell in enumerate(cells):
        if cell not in CLASSES:
            raise DataError(
                f"{table.at(row, SENTIMENT)}: {quoted(cell)} is none of {', '.join(CLASSES)}{nearest(cell, CLASSES)}"
            )
    return np.array([CLASSES.index(cell) for cell in cells], np.int32)


def _vocabulary(sentences: list[list[str]], size: int) -> dict[str, int]:
    counts = Counter(word for words in sentences for word in words)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: FIRST_WORD + rank for rank, word in enumerate(ranked[: size - FIRST_WORD])}


def _tokens(sentences: list[list[str]], words: dict[str, int], length: int) -> npt.NDArray[np.int32]:
    x = np.full((len(sentences), length), PAD, np.int32)
    for row, sentence in enumerate(sentences):
        cut = sentence[:length]
        x[row, : len(cut)] = [words.get(word, UNKNOWN) for word in cut]
    return x
