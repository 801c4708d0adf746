"""Makes a directory of token files: `python -P -m models.datasets.token_files.tokenize_process JOB.json`.

Reports the MiB of text that were read. The job file's `tokenize` is a table of `Request`. The files are written into `folder`, which must be empty; the parent renames it when
this process has ended. Writes the header into `result.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from edge_client.processes import process
from models import job as jobs
from models.datasets.dataset import DataError
from models.datasets.job_arrays import encoding_of
from models.datasets.token_files import tokenizers, writing
from models.datasets.token_files.documents import Documents, Layout, find
from models.datasets.token_files.tokenizers import Tokenizer
from models.options import bounded

_REPORT_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """What to tokenise.

    Attributes:
        inputs: files and folders of text.
        folder: for the files.
        encoding: `bytes`, `characters`, `bpe(n)`, or the absolute path of a `tokenizer.json` or a folder with one.
        documents: layout of the inputs; None: by their names.
        text_key: of the text in a JSON object.
        test_share: of the documents that are held out.
        end_of_document: token of a `tokenizer.json`; empty: a usual one.
        vocabulary: ids of the model, with a `tokenizer.json`; 0: as many as it has.
    """

    inputs: tuple[str, ...]
    folder: str
    encoding: str = "bytes"
    documents: Layout | None = None
    text_key: str = "text"
    test_share: float = bounded(0.05, 1e-6, 0.9)
    end_of_document: str = ""
    vocabulary: int = bounded(0, 0, 2**31)


def tokenize(path: Path, report: process.Report) -> None:
    """Runs the job described in a file."""
    job = jobs.read(path)
    request = job.table("tokenize", Request)
    if request is None:
        raise jobs.JobError(f"{path}: tokenize is missing")
    documents = Documents(find([Path(each) for each in request.inputs]), request.documents, request.text_key)
    total, reported = documents.total_bytes, 0.0

    def progress(stage: str) -> Callable[[int], None]:
        def on_bytes(done: int) -> None:
            nonlocal reported
            if time.monotonic() - reported > _REPORT_SECONDS or done == total:
                reported = time.monotonic()
                report(stage=stage, step=done >> 20, steps=total >> 20)

        return on_bytes

    tokenizer = _tokenizer(request, documents, progress("learn"))
    parts = writing.assigned(documents, request.test_share, progress("tokenize"))
    header = writing.write(Path(request.folder), tokenizer, parts)
    jobs.write_result(job.out, {**asdict(header), "sha256": header.sha256})


def _tokenizer(request: Request, documents: Documents, on_bytes: Callable[[int], None]) -> Tokenizer:
    if Path(request.encoding).is_absolute():
        return tokenizers.read(Path(request.encoding), request.end_of_document, request.vocabulary)
    for option in ("end_of_document", "vocabulary"):
        if getattr(request, option):
            name = option.replace("_", "-")
            raise DataError(f"--{name} is of a tokenizer.json; the encoding is {request.encoding}")
    kind, size = encoding_of(request.encoding)

    def texts() -> Iterator[str]:
        return (piece.text for piece in documents.pieces(on_bytes))

    def train() -> Iterator[str]:
        parts = writing.assigned(documents, request.test_share, on_bytes)
        return (piece.text for split, piece in parts if split == "train")

    return tokenizers.learn(kind, size, texts, train)


if __name__ == "__main__":
    process.serve(tokenize)
