"""Shakespeare's plays, one client a speaking role: next-character prediction (McMahan 2017, section 3).

The text is blocks between blank lines, the first line of a block is `SPEAKER:`. All speeches of one name
are one client's text, each between newlines, as in the play. Some roles only enter; their one
label is the newline that ends the empty speech.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edge_client.data.quoting import quoted
from edge_client.wire.preprocessing import TextSchema
from models.datasets import files
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import take
from models.labels import PADDING

NAME = "tinyshakespeare.txt"
ORIGIN = "https://github.com/karpathy/char-rnn/tree/master/data/tinyshakespeare"
Tokens = npt.NDArray[np.int32]


def load(data_dir: Path | None, length: int) -> Dataset:
    """x [N, length] character ids, y the same shifted by one; the last fifth of each speaker is held out.

    Windows do not overlap. Where a speaker's text ends inside one, `x` repeats id 0 and `y` is `PADDING`.
    The split follows the text, as in the paper, and not the seed: test rows come after the training rows.

    Raises:
        DataError: the file is missing or not of this form.
    """
    path = files.find(data_dir, [NAME], "shakespeare", ORIGIN)
    text = io.StringIO(files.read_text(path, remedy="; download it again"), newline=None).read()
    speakers = _speeches(text, path)
    characters = sorted(set(text))
    ids = {character: index for index, character in enumerate(characters)}
    windows = [
        _windows(
            np.array([ids[character] for character in "".join(f"\n{speech}\n" for speech in speeches)]),
            length,
        )
        for speeches in speakers.values()
    ]
    counts = np.array([len(x) for x, _ in windows])
    return Dataset(
        name="shakespeare",
        x=np.concatenate([x for x, _ in windows]),
        y=np.concatenate([y for _, y in windows]),
        test=np.concatenate([np.arange(count) >= count - take(count) for count in counts.tolist()]),
        classes=len(characters),
        task="next_token",
        class_names=tuple(characters),
        text=TextSchema("characters", "next_token", tuple(characters)),
        site=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        site_names=tuple(speakers),
        notes=(
            f"Each row is {length} characters, labelled with the character after each; rows do not overlap.",
            "The last 20 % of each speaker's rows are held out.",
        ),
    )


def _speeches(text: str, path: Path) -> dict[str, list[str]]:
    """Speaker -> speeches, in the order in which they first speak."""
    speakers: dict[str, list[str]] = {}
    line = 1
    for block in re.split(r"(\n\n+)", text):
        head, _, speech = block.strip("\n").partition("\n")
        if head.endswith(":"):
            speakers.setdefault(head[:-1], []).append(speech)
        elif head:
            raise DataError(f"{path}, line {line}: {quoted(head)} begins a block, expected `SPEAKER:`")
        line += block.count("\n")
    if not speakers:
        raise DataError(f"{path}: is empty, expected blocks that begin with `SPEAKER:`; download it again")
    return speakers


def _windows(tokens: npt.NDArray[np.int64], length: int) -> tuple[Tokens, Tokens]:
    """Inputs and labels [rows, length] of one text of at least two tokens."""
    rows = -(-(len(tokens) - 1) // length)
    padded = np.full(rows * length + 1, PADDING, np.int32)
    padded[: len(tokens)] = tokens
    x = np.maximum(padded[:-1], 0)
    return x.reshape(rows, length), padded[1:].reshape(rows, length)
