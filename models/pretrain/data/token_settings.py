"""Training from a directory of token files (`models.datasets.token_files`), named by a job's `tokens`:

    "tokens": {"directory": "/data/tokens", "sha256": "…", "end_of_document": 256, "packing": "concatenate", "test_rows": 1000}

`concatenate` cuts all documents, one after another, into windows: a window may hold parts of several, and each token sees all before
it in the window (Radford 2019, Brown 2020). `documents` has whole documents in a window and confines attention to each
(`models.pretrain.data.documents`); `train` and `test` then name the indices of the windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models.job import JobFile


@dataclass(frozen=True)
class TokenSource:
    """A job's `tokens`, if it names a directory.

    Attributes:
        sha256: of the header; empty: any.
        test_rows: windows of the test split to score, spread over it; 0: all.
        train, test: indices of packed windows (`models.datasets.token_files.packing`), relative to the job file.
    """

    directory: str
    end_of_document: int
    sha256: str = ""
    packing: Literal["concatenate", "documents"] = "concatenate"
    test_rows: int = 0
    train: str = ""
    test: str = ""


def names_directory(job: JobFile) -> bool:
    """Whether the job trains from a directory of token files."""
    tokens = job.settings.get("tokens")
    return isinstance(tokens, dict) and "directory" in tokens


def from_job(job: JobFile) -> TokenSource:
    """The job's `tokens`. Raises: JobError: a key is missing or wrong."""
    found = job.table("tokens", TokenSource)
    assert found is not None
    return found
