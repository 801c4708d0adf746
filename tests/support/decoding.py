"""Token ids back to text, from the JSON description of an encoding alone."""

from __future__ import annotations

import json

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer


def decode(described: str, tokens: npt.NDArray[np.integer]) -> str:
    """The text of `tokens` in the encoding whose file has the content `described`."""
    encoding = json.loads(described)
    match encoding["kind"]:
        case "characters":
            return "".join(encoding["alphabet"][token] for token in tokens.tolist())
        case "bytes":
            return tokens.astype(np.uint8).tobytes().decode("utf-8")
        case "bpe":
            text: str = Tokenizer.from_str(json.dumps(encoding["tokenizer"])).decode(tokens.tolist())
            return text
    raise AssertionError(encoding["kind"])
