"""Tokens of one sequence as text, piece by piece, up to a stop string.

A token may be a part of a character (bytes, byte-level pairs) and its text may depend on the token before it, so a piece
is the difference of two decoded texts: the latest tokens with and without the new ones. What may still become a stop
string is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of tokens; an incomplete character at the end becomes U+FFFD."""

INCOMPLETE = "\ufffd"
MOST_HELD = 3
"""Bytes of the longest character of UTF-8 but its last: as many U+FFFD at the end may still become a character."""
WINDOW = 32
"""Tokens without a whole character that are decoded together; beyond them the first ones are left out."""


class TextStream:
    """Text of the tokens that are pushed.

    Args:
        before: tokens that they follow, on which their text may depend: a blank at the beginning of a text is none of it.

    Attributes:
        stopped: whether a stop string has occurred; the text ends before it.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        self._decode, self._stop = decode, tuple(stop)
        is_whole = not decode(before).endswith(INCOMPLETE)
        self._context = list(before) if is_whole else []
        self._new: list[int] = []
        self._given = 0  # characters of the new tokens' text that were returned
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that the token completes. What is certain of broken characters comes as U+FFFD, as `decode` has it."""
        self._new.append(token)
        piece = self._piece()
        whole = piece.rstrip(INCOMPLETE)
        if whole == piece:
            text = piece[self._given :]
            self._context, self._new, self._given = self._new, [], 0
            return self._up_to_stop(text)
        end = max(self._given, len(whole), len(piece) - MOST_HELD)
        text, self._given = piece[self._given : end], end
        if len(self._new) > WINDOW:
            self._leave_out_first(piece)
        return self._up_to_stop(text)

    def flush(self) -> str:
        """What was held back, when no token follows."""
        if self.stopped:
            return ""
        text = self._up_to_stop(self._piece()[self._given :] if self._new else "")
        rest, self._held, self._new = self._held, "", []
        return text if self.stopped else text + rest

    def _piece(self) -> str:
        before = self._decode(self._context) if self._context else ""
        text = self._decode([*self._context, *self._new])
        # Bytes that follow whole characters may spoil them where a tokenizer decodes all bytes in a row together.
        return text[len(before) :] if text.startswith(before) else self._decode(self._new)

    def _leave_out_first(self, piece: str) -> None:
        """Makes the first of the new tokens the context of the others, where the text of both is that of all."""
        for count in range(len(self._new) - MOST_HELD - 1, len(self._new)):
            first, rest = self._decode(self._new[:count]), self._decode(self._new[count:])
            if first + rest == piece:
                self._context, self._new = self._new[:count], self._new[count:]
                self._given = max(self._given - len(first), 0)
                return

    def _up_to_stop(self, piece: str) -> str:
        text = self._held + piece
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )
