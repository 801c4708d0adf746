"""`fedloop pretrain tokenize`: texts as token files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.commands.options import Json
from coordinator.commands.output import RichProgress, print_summary

Inputs = Annotated[
    list[Path],
    typer.Argument(
        help="Text files, JSON Lines, or folders of them; each may be gzipped.", metavar="INPUT..."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="Folder for the token files, new or empty.", metavar="DIR")]
EncodingName = Annotated[
    str,
    typer.Option(
        "--encoding",
        help="bytes, characters, bpe(n), or the path of a tokenizer.json or of a folder with one.",
    ),
]
Documents = Annotated[
    str | None,
    typer.Option(
        "--documents",
        help="What is a document: file, line, or jsonl, a line with a JSON object. Default: jsonl for .jsonl, otherwise file.",
    ),
]
TextKey = Annotated[str, typer.Option("--text-key", help="Key of the text in a JSON object.", metavar="KEY")]
TestShare = Annotated[
    float, typer.Option("--test-share", min=1e-6, max=0.9, help="Share of the documents to hold out.")
]
EndOfDocument = Annotated[
    str,
    typer.Option(
        "--end-of-document",
        help="Token of a tokenizer.json that ends a document. Default: the usual one that it has.",
        metavar="TOKEN",
    ),
]
Vocabulary = Annotated[
    int,
    typer.Option(
        "--vocabulary",
        min=0,
        help="Ids of the model, with a tokenizer.json that has fewer. Default: as many as that has.",
    ),
]


def tokenize(
    inputs: Inputs,
    out: Out,
    encoding: EncodingName = "bytes",
    documents: Documents = None,
    text_key: TextKey = "text",
    test_share: TestShare = 0.05,
    end_of_document: EndOfDocument = "",
    vocabulary: Vocabulary = 0,
    as_json: Json = False,
) -> None:
    """Encode texts as token ids once, into a folder that any number of pretrainings map into memory.

    With data.dataset = "tokens" and data.path, `fedloop pretrain` trains from it.
    """
    from coordinator.datacenter import tokenization
    from coordinator.datacenter.jobs import Environment
    from coordinator.datacenter.training_data import names_tokenizer

    request = {
        "inputs": [str(path.absolute()) for path in inputs],
        "encoding": str(Path(encoding).absolute()) if names_tokenizer(encoding) else encoding,
        "documents": documents,
        "text_key": text_key,
        "test_share": test_share,
        "end_of_document": end_of_document,
        "vocabulary": vocabulary,
    }
    with RichProgress() as progress:
        header = tokenization.tokenize(request, out, Environment(progress=progress))
    print_summary({"out": str(out), **header}, summarise(header, out), as_json=as_json)


def summarise(header: Mapping[str, Any], folder: Path) -> str:
    """What a folder of token files holds."""
    lines = [
        f"{split}: {count['tokens']:,} tokens of {count['characters']:,} characters in {count['documents']:,} documents"
        for split, count in ((split, header[split]) for split in ("train", "test"))
    ]
    return "\n".join(
        [
            *lines,
            f"{header['encoding']}: {header['vocabulary']:,} ids as {header['dtype']}, {header['end_of_document']} ends a document",
            f"SHA-256 {header['sha256'][:16]}…  in {folder}/",
            f"train from it: fedloop pretrain --set data.dataset=tokens --set data.path={folder}",
        ]
    )
