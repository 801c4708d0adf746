"""Training from a directory of token files, as `models.pretrain.data.token_settings` describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from models.datasets.token_files.directory import Split, TokenDirectory, open_directory
from models.job import JobError, JobFile
from models.labels import PADDING
from models.pretrain.data import token_settings
from models.pretrain.data.batches import BatchRandom, Indices, Rows, Source, Transformed
from models.pretrain.data.token_settings import TokenSource
from models.pretrain.data.tokens import Windows


@dataclass(frozen=True)
class PackedDocuments:
    """Windows of whole documents, each token labelled with the next of its document.

    Padding is `end`, and a label that does not count: of padding, and of the last token of a document.

    Attributes:
        tokens: [N], mapped.
        index: [windows + 1, 2], mapped.
        end: id that ends each document.
    """

    tokens: npt.NDArray[Any]
    index: npt.NDArray[np.int64]
    length: int
    end: int

    def __len__(self) -> int:
        return len(self.index) - 1

    def read(self, rows: Indices, random: BatchRandom | None = None) -> Rows:
        starts, ends = self.index[rows, 0], self.index[rows + 1, 0]
        places = starts[:, None] + np.arange(self.length + 1)
        windows = np.asarray(self.tokens[np.minimum(places, len(self.tokens) - 1)], np.int32)
        x = np.where(places[:, :-1] < ends[:, None], windows[:, :-1], np.int32(self.end))
        return x, np.where(x == self.end, np.int32(PADDING), windows[:, 1:])

    def counted(self, rows: Indices) -> int:
        return int((self.index[rows + 1, 1] - self.index[rows, 1]).sum())


@dataclass(frozen=True)
class Spread(Transformed):
    """So many examples of another source, at equal distances."""

    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, rows: Indices, random: BatchRandom) -> Rows:
        return self.source.read(self._places(rows), random)

    def counted(self, rows: Indices) -> int:
        return self.source.counted(self._places(rows))

    def _places(self, rows: Indices) -> Indices:
        return rows * len(self.source) // self.count


def load(job: JobFile, length: int, vocabulary: int) -> tuple[Source, Source]:
    """The training and the test windows of `length` tokens. Reads the header, and maps the rest.

    `vocabulary`: ids that the model knows.

    Raises:
        JobError: the model does not know all ids, or there is no window.
        DataError: the directory is missing, damaged, or another than the one that the job names.
    """
    settings = token_settings.from_job(job)
    found = open_directory(job.file("tokens.directory", settings.directory), settings.sha256)
    if found.header.vocabulary > vocabulary:
        raise JobError(
            f"{found.path} has token ids from 0 to {found.header.vocabulary - 1}, but the model knows {vocabulary}; expected a model of "
            "this vocabulary, or texts tokenised for the model"
        )
    train, test = (
        _windows(job, settings, found, "train", length),
        _windows(job, settings, found, "test", length),
    )
    limited = 0 < settings.test_rows < len(test)
    return train, Spread(test, settings.test_rows) if limited else test


def _windows(job: JobFile, settings: TokenSource, found: TokenDirectory, split: Split, length: int) -> Source:
    tokens = found.tokens(split)
    windows: Windows | PackedDocuments = Windows(tokens, length)
    if settings.packing == "documents":
        index = np.load(
            job.file(f"tokens.{split}", getattr(settings, split)), mmap_mode="r", allow_pickle=False
        )
        windows = PackedDocuments(tokens, index, length, settings.end_of_document)
    if not len(windows):
        raise JobError(
            f"{found.path} has {len(tokens):,} {split} tokens, expected more than the {length:,} of one window: more text, or a "
            "smaller data.length"
        )
    return windows
