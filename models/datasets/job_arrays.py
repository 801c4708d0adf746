"""A data set as the arrays of a datacenter job: `python -P -m models.datasets.job_arrays JOB.json`.

The job file's `data` are keyword arguments of `models.datasets.load`, with `test_rows`: how many of the held-out
rows to keep, drawn by the seed; 0: all; `public_samples`: train only on the rows that a federation withholds from
its clients; and `schema`: of the model that the rows are for. It is a process of its own because a data set may be a user's code. It writes `x_train`, `y_train`,
`x_test`, `y_test` into the job's `arrays`, and a description into `result.json`.

The data set `tokens` is a directory of token files, `path`, which is checked and not copied; with `packing` = `documents` the index of
its windows is written.

With an `encoding`, `characters`, `bytes`, `bpe(n)` or the absolute path of a tokenizer, the data set is a text, `shakespeare` or the file `path`, and what
is written are the token files of `models.datasets.corpus`; of the held-out tokens the first `test_rows` windows. With a `label` it is a table of texts
(`models.datasets.labelled_texts`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_client.files import write_durably
from edge_client.processes import process
from edge_client.wire import schema as schemas
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema
from models import datasets, options
from models import job as jobs
from models.datasets import corpus, encodings, labelled_texts
from models.datasets.token_files import tokenizers
from models.datasets.token_files.directory import SPLITS, TEXT, TOKENIZER, open_directory
from models.datasets.token_files.packing import pack

DEFAULT_LENGTH = 64
"""Tokens in a window of token files."""


def load(path: Path, report: process.Report) -> None:
    """Runs the job described in a file."""
    job = jobs.read(path)
    arguments: dict[str, Any] = dict(job.value("data"))
    test_rows, public = arguments.pop("test_rows", 0), arguments.pop("public_samples", 0)
    document = arguments.pop("schema", None)
    schema = None if document is None else schemas.from_document(document)
    report(stage="load")
    if arguments["dataset"] == "tokens":
        jobs.write_result(job.out, _tokens(job, arguments, test_rows, report))
        return
    is_labelled = arguments["dataset"] == "text" and "label" in arguments
    if "encoding" in arguments and arguments["dataset"] != "csv" and not is_labelled:
        jobs.write_result(job.out, _text(job, arguments, test_rows))
        return
    data_dir = Path(arguments["data_dir"]) if "data_dir" in arguments else None
    if is_labelled:
        table, tokenizer = Path(arguments["path"]), Path(arguments["encoding"])
        (column,), label = arguments["features"], arguments["label"]
        dataset = labelled_texts.load(table, column, label, arguments["length"], tokenizer, job.seed)
    else:
        dataset = datasets.from_settings(arguments, data_dir=data_dir, seed=job.seed, schema=schema)
    train, test = np.flatnonzero(~dataset.test), np.flatnonzero(dataset.test)
    if not len(train) or not len(test):
        raise datasets.DataError(
            f"data set {dataset.name!r} has {len(train)} rows to train on and {len(test)} held out; both are needed"
        )
    if 0 < test_rows < len(test):
        test = np.sort(np.random.default_rng(job.seed).choice(test, test_rows, replace=False))
    if public:
        train = np.sort(datasets.public_rows(dataset, public, job.seed))
    folder = job.file("arrays", job.value("arrays"))
    for part, rows in (("train", train), ("test", test)):
        np.save(folder / f"x_{part}.npy", dataset.x[rows], allow_pickle=False)
        np.save(folder / f"y_{part}.npy", dataset.y[rows], allow_pickle=False)
    description = {
        "fingerprint": dataset.fingerprint(),
        "rows": {"train": len(train), "test": len(test)},
        "input_shape": list(dataset.input_shape),
        "classes": dataset.classes,
        "input_dtype": dataset.input_dtype,
        "task": dataset.task,
        "class_names": list(dataset.class_names),
        "schema": dataset.described.to_document(),
        "preview": datasets.preview(dataset),
        "shown": datasets.preview(dataset, private=True),
    }
    jobs.write_result(job.out, description)


def _text(job: jobs.JobFile, arguments: dict[str, Any], test_rows: int) -> dict[str, Any]:
    folder, length = job.file("arrays", job.value("arrays")), arguments["length"]
    data_dir = Path(arguments["data_dir"]) if "data_dir" in arguments else None
    path = corpus.find(arguments.get("path") or arguments["dataset"], data_dir)
    if Path(arguments["encoding"]).is_absolute():
        tokenizer = tokenizers.read(Path(arguments["encoding"]))
        prepared = corpus.prepare(path, folder, known=(tokenizer.as_encoding(), tokenizer.text))
        write_durably(folder / TOKENIZER, tokenizer.tokenizer.encode())
    else:
        kind, vocab = encoding_of(arguments["encoding"])
        prepared = corpus.prepare(path, folder, kind, vocab)
    held_out = folder / corpus.TEST
    rows = (prepared.test - 1) // length
    if 0 < test_rows < rows:
        tokens = np.load(held_out, allow_pickle=False)[: test_rows * length + 1]
        np.save(held_out, tokens, allow_pickle=False)
        rows = test_rows
    schema = corpus.schema_of(prepared, length)
    digest = hashlib.sha256()
    for name in (corpus.TRAIN, corpus.TEST):
        digest.update((folder / name).read_bytes())
    return {
        "fingerprint": digest.hexdigest(),
        "rows": {"train": (prepared.train - 1) // length, "test": rows},
        "input_shape": [length],
        "classes": prepared.vocab,
        "input_dtype": "int32",
        "task": "next_token",
        "class_names": [],
        "schema": schema.to_document(),
        "tokens": {"train": corpus.TRAIN, "test": corpus.TEST},
        "preview": [
            f"{path.name}: {prepared.characters:,} characters, {prepared.train:,} tokens to train on and {prepared.test:,} held out",
            f"encoding {arguments['encoding']}: {prepared.vocab} ids",
        ],
    }


def _tokens(
    job: jobs.JobFile, arguments: dict[str, Any], test_rows: int, report: process.Report
) -> dict[str, Any]:
    path, length = Path(arguments["path"]), arguments.get("length", DEFAULT_LENGTH)
    packing = arguments.get("packing", "concatenate")
    found = open_directory(path)
    read = found.verify(_shown(report, f"{path.name}: reading all files once, to check them"))
    header, folder = found.header, job.file("arrays", job.value("arrays"))
    tokens: dict[str, Any] = {
        "directory": str(path.absolute()),
        "sha256": header.sha256,
        "end_of_document": header.end_of_document,
        "packing": packing,
        "test_rows": test_rows,
    }
    rows = {split: max(0, header.count(split).tokens - 1) // length for split in SPLITS}
    full = ""
    if packing == "documents":
        for split in SPLITS:
            rows[split] = pack(found.documents(split), length, folder / f"windows_{split}.npy")
            tokens[split] = f"windows_{split}.npy"
        full = f", {header.train.tokens / max(1, rows['train'] * length):.0%} full"
    if not all(rows.values()):
        raise datasets.DataError(
            f"{path} has {header.train.tokens:,} tokens to train on and {header.test.tokens:,} held out, expected a window of {length:,} of "
            "each: more text, or a smaller data.length"
        )
    rows["test"] = min(test_rows or rows["test"], rows["test"])
    if TOKENIZER in header.files:  # goes with the model, wherever the token files are by then
        write_durably(folder / TOKENIZER, (path / TOKENIZER).read_bytes())
    document = found.text()
    text = None if document is None else options.read(TextSchema, document, str(path / TEXT))
    kind: Literal["text", "array"] = "array" if text is None else "text"
    schema = DataSchema(kind, (length,), "int32", minimum_count=max(1, header.minimum_count), text=text)
    return {
        "fingerprint": header.sha256,
        "rows": rows,
        "input_shape": [length],
        "classes": header.vocabulary,
        "input_dtype": "int32",
        "task": "next_token",
        "class_names": [],
        "schema": schema.to_document(),
        "tokens": tokens,
        "preview": [
            f"{path.name}: {header.train.tokens:,} tokens in {header.train.documents:,} documents to train on, {header.test.tokens:,} in "
            f"{header.test.documents:,} held out; {rows['train']:,} windows{full}",
            f"encoding {header.encoding}: {header.vocabulary} ids; SHA-256 {header.sha256[:12]}… "
            + ("checked" if read else "checked before, and not touched since"),
        ],
    }


def _shown(report: process.Report, note: str) -> Callable[[float], None]:
    """Reports a share that grows: the note first, then each percent."""
    percent = -1

    def on_progress(share: float) -> None:
        nonlocal percent
        if percent < 0:
            report(stage="load", note=note)
        if int(share * 100) > percent:
            percent = int(share * 100)
            report(stage="load", step=percent, steps=100)

    return on_progress


def encoding_of(text: str) -> tuple[encodings.Kind, int]:
    """Kind and number of ids of `characters`, `bytes` or `bpe(n)`.

    Raises:
        DataError: something else.
    """
    match = re.fullmatch(r"(characters|bytes|bpe)(?:\((\d+)\))?", text)
    if match is None or (match[1] == "bpe") != bool(match[2]):
        raise datasets.DataError(
            f"encoding {text!r}: expected characters, bytes, bpe(n) such as bpe(512), or the path of a tokenizer.json"
        )
    kind: encodings.Kind = match[1]  # type: ignore[assignment]
    return kind, int(match[2] or 0)


if __name__ == "__main__":
    process.serve(load)
