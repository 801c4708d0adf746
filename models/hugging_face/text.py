"""How the texts for a folder's model become token ids: its data schema, by the folder's tokenizer."""

from __future__ import annotations

from pathlib import Path

from edge_client.serving import tokenizer_json
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import DataSchema
from models.datasets.token_files.tokenizer_folder import TOKENIZER, end_ids, read_content
from models.hugging_face.config import CONFIG, Description, read_json
from models.options import JobError


def data_schema(folder: Path, description: Description) -> DataSchema | None:
    """How rows for the model of a folder are read: texts, with the names of the classes; None if it has no tokenizer.

    A model of masked tokens predicts no text that follows, so it has none either.

    Raises:
        JobError, DataError: a file is damaged, or the tokenizer has more ids than the model; names the file.
    """
    options = description.options
    if options.get("objective") == "masked" or not (folder / TOKENIZER).is_file():
        return None
    goes_on = description.task == "next_token"
    text = text_schema(folder, options["vocab"], goes_on)
    classes = () if goes_on else class_names(folder, description.classes)
    return DataSchema("text", (description.length,), "int32", classes, text=text)


def text_schema(folder: Path, vocabulary: int, goes_on: bool) -> TextSchema:
    """Of a folder's tokenizer.json.

    Args:
        vocabulary: rows of the model's embedding.
        goes_on: whether the model predicts the next token of a text; else it classifies it.

    Raises:
        JobError, DataError: as `data_schema`.
    """
    content = read_content(folder / TOKENIZER)
    size = tokenizer_json.size(content)
    if size > vocabulary:
        raise JobError(
            f"{folder / TOKENIZER}: has ids up to {size - 1}, and the embedding of the model {vocabulary} rows; take the tokenizer that the "
            "model was trained with, or add rows (resize_token_embeddings of transformers)"
        )
    if not goes_on:
        return TextSchema("tokenizer", "class", tokenizer=content)
    ends = end_ids(folder, content, vocabulary)
    end, stops = (ends[0], tuple(ends[1:])) if ends else (None, ())
    return TextSchema("tokenizer", "next_token", end=end, stops=stops, tokenizer=content)


def class_names(folder: Path, classes: int) -> tuple[str, ...]:
    """The names of a classifier's classes by config.json; empty if they are not all there and different."""
    named = read_json(folder / CONFIG).get("id2label")
    found = [named.get(str(index)) for index in range(classes)] if isinstance(named, dict) else []
    texts = [name for name in found if isinstance(name, str) and name]
    return tuple(texts) if len(set(texts)) == classes else ()
