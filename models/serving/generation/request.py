"""What is asked of an engine, and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]
Reason = Literal[
    "empty_prompt",
    "prompt_too_long",
    "token_out_of_vocabulary",
    "invalid_option",
    "duplicate_id",
    "cache_too_small",
    "cannot_decode",
]

MAX_TOP_LOGPROBS = 100
MAX_STOPS = 16


class InvalidRequest(ValueError):
    """A request that cannot be answered; the message says why.

    Attributes:
        reason: stable, for programs.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_p: draws from the fewest tokens that together have this probability (Holtzman 2020).
        top_k: draws from this many most probable tokens; 0: from all. Applied before `top_p`.
        seed: of the request's own generator, so that its draws depend on nothing else; None: an unpredictable one.
        top_logprobs: how many of the most probable tokens an event names, with their log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        id: of the caller's choice, different from those of all unfinished requests.
        prompt: token ids, at least one.
        max_tokens: how many tokens to generate at most.
        stop: strings that end the text; they are not part of it.
        stop_tokens: token ids that end the sequence; the one that does is reported and is not part of the text.
        cache_salt: keys and values are shared with requests of the same salt only. That a prompt was asked before shows
            in the time it takes, so those who must not learn this of each other need different ones.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True)
class Event:
    """A token of a request, or its end without one.

    Attributes:
        token: None where the request was cancelled.
        text: what the token adds to the text, once nothing that follows can change it: empty while a character is
            incomplete or a stop string may have begun.
        logprob: the token's log-probability by the model, before temperature and restrictions to probable tokens.
        top: the most probable tokens with theirs, the most probable first.
        cached_prompt_tokens: tokens of the prompt whose keys and values were there already.
    """

    id: str
    token: int | None = None
    text: str = ""
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    cached_prompt_tokens: int = 0


def check(request: Request, vocab: int, length: int) -> None:
    """Checks a request for a model of `vocab` tokens and `length` positions.

    Raises:
        InvalidRequest: it cannot be answered.
    """
    if not request.prompt:
        raise InvalidRequest("empty_prompt", "prompt has no token, expected one or more")
    if len(request.prompt) > length:
        problem = f"prompt has {len(request.prompt):,} tokens, the model takes at most {length:,}"
        raise InvalidRequest("prompt_too_long", problem)
    for name, tokens in (("prompt", request.prompt), ("stop_tokens", request.stop_tokens)):
        for place, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                problem = f"{name}[{place}] is {token!r}, expected a token id from 0 to {vocab - 1}"
                raise InvalidRequest("token_out_of_vocabulary", problem)
    sampling = request.sampling
    _require_whole("max_tokens", request.max_tokens, 1)
    _require_whole("top_k", sampling.top_k, 0)
    _require_whole("top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if sampling.seed is not None:
        _require_whole("seed", sampling.seed, 0, 2**64 - 1)
    _require(math.isfinite(sampling.temperature), "temperature", sampling.temperature, "a finite number")
    _require(sampling.temperature >= 0, "temperature", sampling.temperature, "0 or more")
    _require(0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0 and at most 1")
    _require(len(request.stop) <= MAX_STOPS, "stop", len(request.stop), f"at most {MAX_STOPS} strings")
    _require(all(request.stop), "stop", "", "strings of one character or more")


def _require_whole(name: str, value: int, least: int, most: int | None = None) -> None:
    bounds = f"of {least} or more" if most is None else f"from {least} to {most}"
    whole = isinstance(value, int) and not isinstance(value, bool)
    inside = whole and least <= value and (most is None or value <= most)
    _require(inside, name, value, f"a whole number {bounds}")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise InvalidRequest("invalid_option", f"{name} is {value!r}, expected {expected}")
