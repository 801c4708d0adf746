"""How an image or a text becomes the input of a model: the part of a data schema that columns do not say.

Both are stated, not learnt: a device, a release and a simulation that read the same file therefore compute the same input. A
vocabulary that was learnt from private text names no token that fewer than the schema's `minimum_count` rows have: it is "" there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ImageSchema:
    """A value of the input is (pixel / divisor - mean) / deviation.

    Attributes:
        layout: axes of the input: H is height, W width, C one or three channels.
        maximum: largest pixel of the training images, which are whole numbers from 0; the 255 of an image file stands for it.
        divisor: > 0.
        mean, deviation: of each channel, after the division; empty: 0 and 1.
    """

    layout: Literal["HW", "CHW", "HWC"]
    maximum: int
    divisor: float
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def size(self, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Height, width and channels."""
        match self.layout:
            case "HW":
                return input_shape[0], input_shape[1], 1
            case "CHW":
                return input_shape[1], input_shape[2], input_shape[0]
        return input_shape[0], input_shape[1], input_shape[2]


@dataclass(frozen=True)
class TextSchema:
    """A text is lower-cased if `lower` says so, split into tokens, cut to the input's length and filled up with `padding`.

    Attributes:
        unit: `bytes` of UTF-8, whose ids are their values; `characters`; `words`: runs of letters, runs of digits, every other mark;
            `bpe`: bytes merged to longer tokens, written in the byte-level alphabet (Radford 2019, section 2.2); `tokenizer`: as
            `tokenizer` says, with the special tokens that it adds to a text.
        predicts: `class`: a text has one; `next_token`: the classes are the token ids.
        vocabulary: the tokens of ids `first`, `first` + 1, …; empty for bytes and of a `tokenizer`, which has its own.
        first: id of the first token.
        padding: id that fills up short texts.
        unknown: id of tokens that the vocabulary lacks; None: they are refused.
        merges: of bpe, the pairs of tokens that become one, "left right", the first merged first.
        end: id that ended each text of the training; a text that is generated ends with it.
        stops: further ids with which a generated text ends.
        tokenizer: content of a `tokenizer.json` of the library `tokenizers`.
    """

    unit: Literal["bytes", "characters", "words", "bpe", "tokenizer"]
    predicts: Literal["class", "next_token"]
    vocabulary: tuple[str, ...] = ()
    first: int = 0
    padding: int = 0
    unknown: int | None = None
    lower: bool = False
    merges: tuple[str, ...] = ()
    end: int | None = None
    stops: tuple[int, ...] = ()
    tokenizer: str = ""

    @property
    def tokens(self) -> int:
        """How many ids there are from `first` on, with and without a name."""
        if self.unit == "bytes":
            return 256
        if self.unit != "tokenizer":
            return len(self.vocabulary)
        document = json.loads(self.tokenizer)
        vocabulary = document["model"]["vocab"]
        ids: list[int] = [token["id"] for token in document.get("added_tokens", ())]
        ids += [len(vocabulary) - 1] if isinstance(vocabulary, list) else vocabulary.values()
        return 1 + max(ids)


def image_checks(image: ImageSchema, input_shape: tuple[int, ...]) -> Iterable[tuple[bool, str]]:
    """What the types do not express: a condition, and what is wrong if it is false."""
    fits = len(input_shape) == len(image.layout)
    yield fits, f"image.layout is {image.layout}, input_shape {list(input_shape)}"
    yield 0 < image.maximum < 2**16, "image.maximum is not between 1 and 65535"
    yield image.divisor > 0, "image.divisor is not above 0"
    yield all(each > 0 for each in image.deviation), "image.deviation has a value that is not above 0"
    if fits:
        channels = image.size(input_shape)[2]
        yield channels in (1, 3), f"an image has 1 or 3 channels, this one {channels}"
        lengths = {len(image.mean), len(image.deviation)}
        yield lengths in ({0}, {channels}), f"image.mean and image.deviation are not of {channels} channels"


def text_checks(text: TextSchema, input_shape: tuple[int, ...]) -> Iterable[tuple[bool, str]]:
    """As `image_checks`."""
    yield len(input_shape) == 1, f"input_shape of a text is [tokens], not {list(input_shape)}"
    has_tokens = text.unit not in ("bytes", "tokenizer")
    yield has_tokens == bool(text.vocabulary), "text.vocabulary is of characters, words and bpe"
    yield (text.unit == "tokenizer") == bool(text.tokenizer), "text.tokenizer is of the unit of this name"
    ids = (text.first, text.padding, text.unknown or 0, text.end or 0, *text.stops)
    yield min(ids) >= 0, "an id of text is below 0"
    goes_on = text.predicts == "next_token"
    yield goes_on or (text.end is None and not text.stops), "text.end is of a text that goes on"
    named = [token for token in text.vocabulary if token]
    yield len(set(named)) == len(named), "a token is there twice"
    single = text.unit != "characters" or all(len(token) == 1 for token in named)
    yield single, "text.vocabulary has a token that is no character"
    yield text.unit == "bpe" or not text.merges, "text.merges is of bpe"
    if text.unit == "bpe":
        yield len(named) >= 256, f"text.vocabulary of bpe has {len(named)} tokens, and there are 256 bytes"
        known, pairs = set(named), [pair.split(" ") for pair in text.merges]
        whole = all(len(pair) == 2 and {*pair, "".join(pair)} <= known for pair in pairs)
        yield whole, "text.merges has a pair that the vocabulary lacks"
    if text.unit in ("bpe", "tokenizer"):
        yield text.first == 0 and text.unknown is None, f"{text.unit} counts from 0 and knows every text"
