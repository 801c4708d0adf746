"""Financial PhraseBank: 4,846 news sentences, each negative, neutral or positive (Malo et al. 2014)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.quoting import quoted
from edge_client.serving.texts import WORD, encode
from edge_client.wire.preprocessing import TextSchema
from models.datasets import columns, files
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import held_out
from strategies.suggestions import suggest

NAME = "financial_phrasebank.csv"
ORIGIN = "https://www.kaggle.com/datasets/ankurzing/sentiment-analysis-for-financial-news"
SENTIMENT, SENTENCE = "Sentiment", "News Headline"
CLASSES = ("negative", "neutral", "positive")

PAD, UNKNOWN, FIRST_WORD = 0, 1, 2


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
    sentences = table.cells(SENTENCE, "the sentence")
    words = _vocabulary(
        [sentence for sentence, out in zip(sentences, test.tolist(), strict=True) if not out], vocabulary
    )
    text = TextSchema("words", "class", words, FIRST_WORD, PAD, UNKNOWN, lower=True)
    return Dataset(
        name="phrasebank",
        x=encode(sentences, text, length, str(path))[0],
        y=y,
        test=test,
        classes=len(CLASSES),
        class_names=CLASSES,
        text=text,
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
                f"{table.at(row, SENTIMENT)}: {quoted(cell)} is none of {', '.join(CLASSES)}{suggest(cell, CLASSES)}"
            )
    return np.array([CLASSES.index(cell) for cell in cells], np.int32)


def _vocabulary(sentences: list[str], size: int) -> tuple[str, ...]:
    counts = Counter(word for sentence in sentences for word in WORD.findall(sentence.lower()))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return tuple(ranked[: size - FIRST_WORD])
