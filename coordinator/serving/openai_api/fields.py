"""The fields of a request for completions, each of them checked.

A field that would change the text in a way that the service cannot is refused by its name, and so is one that is unknown;
`user` says nothing of the text. `top_k` is an addition to OpenAI's fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.errors import Refusal
from coordinator.serving.inference import GenerationRequest

MAX_CHOICES = 128
"""Texts of one request: prompts times `best_of`."""

MAX_IDS = 2**20
"""Token ids of one prompt, whatever the model takes."""


@dataclass(frozen=True)
class Completion:
    """What a request asks for.

    Attributes:
        prompts: texts, or token ids.
        template: of the requests; with the prompt, the seed and, for `best_of`, log-probabilities left to fill in.
        best_of: texts for each prompt, of which the `n` most probable ones are answered.
    """

    prompts: Sequence[str | Sequence[int]]
    template: GenerationRequest
    n: int
    best_of: int
    echo: bool
    stream: bool
    include_usage: bool

    def requests(self) -> list[GenerationRequest]:
        """One for each text: `best_of` for the first prompt, then those for the next."""
        seed, logprobs = self.template.seed, self.template.logprobs
        if logprobs is None and self.best_of > self.n:
            logprobs = 0
        return [
            replace(self.template, prompt=prompt, logprobs=logprobs, seed=None if seed is None else seed + at)
            for prompt in self.prompts
            for at in range(self.best_of)
        ]


def parse(body: Mapping[str, Any]) -> Completion:
    """Raises: Refusal: 400 with `param`, the first field that is wrong, unknown or not supported."""
    fields = _Fields(body)
    n = fields.whole("n", 1, 1, MAX_CHOICES)
    asked = Completion(
        prompts=fields.prompts(),
        template=GenerationRequest(
            model=fields.text("model"),
            prompt="",
            max_tokens=fields.whole("max_tokens", 16, 1, 2**31 - 1),
            temperature=fields.number("temperature", 1.0, 0.0, 2.0),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            top_k=fields.whole("top_k", 0, 0, 2**31 - 1),
            seed=fields.optional_whole("seed", -(2**63), 2**63 - 1),
            stop=fields.stop(),
            logprobs=fields.optional_whole("logprobs", 0, 5),
        ),
        n=n,
        best_of=fields.whole("best_of", n, n, MAX_CHOICES),
        echo=fields.flag("echo"),
        stream=fields.flag("stream"),
        include_usage=fields.include_usage(),
    )
    fields.refuse_others()
    _refuse_combinations(asked, body)
    return asked


def _refuse_combinations(asked: Completion, body: Mapping[str, Any]) -> None:
    if asked.stream and asked.best_of > asked.n:
        raise _wrong("best_of", "the best texts are not known before the last; leave out best_of or stream")
    if body.get("stream_options") is not None and not asked.stream:
        raise _wrong("stream_options", "it goes with stream = true only")
    if asked.echo and asked.template.logprobs is not None:
        raise _wrong("echo", "log-probabilities of the prompt are not computed; leave out echo or logprobs")
    if asked.echo and not all(isinstance(each, str) for each in asked.prompts):
        raise _wrong("echo", "token ids cannot be repeated as text; send the prompt as text")
    if len(asked.prompts) * asked.best_of > MAX_CHOICES:
        raise _wrong(
            "prompt",
            f"{len(asked.prompts)} prompts of {asked.best_of} texts each are more than {MAX_CHOICES}",
        )


class _Fields:
    """Takes the fields of a body one by one. A field that is null is absent, as for OpenAI."""

    _NEUTRAL: Mapping[str, tuple[Any, ...]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "suffix": ("",),
    }
    """Fields that are not supported, and what of them changes nothing."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if value is not None}

    def text(self, name: str) -> str:
        value = self._left.pop(name, None)
        if not isinstance(value, str):
            raise _unexpected(name, value, "a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._left.pop(name, False)
        if not isinstance(value, bool):
            raise _unexpected(name, value, "true or false")
        return value

    def optional_whole(self, name: str, least: int, most: int) -> int | None:
        if name not in self._left:
            return None
        value = self._left.pop(name)
        if type(value) is not int or not least <= value <= most:
            raise _unexpected(name, value, f"a whole number from {least} to {most}")
        return int(value)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        value = self.optional_whole(name, least, most)
        return default if value is None else value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        value = self._left.pop(name, default)
        if type(value) not in (int, float) or not least <= value <= most:
            raise _unexpected(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def prompts(self) -> list[str | Sequence[int]]:
        """A text, texts, the ids of one, or the ids of several."""
        value = self._left.pop("prompt", None)
        if isinstance(value, list) and len(value) > MAX_IDS:
            raise _wrong("prompt", f"it has {len(value)} entries, expected at most {MAX_IDS}")
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            if all(map(_is_id, value)):
                return [value]
            if all(isinstance(each, str) for each in value):
                return list(value)
            if all(isinstance(each, list) and each and all(map(_is_id, each)) for each in value):
                return list(value)
        raise _unexpected("prompt", value, "a text, token ids, or a list of either")

    def stop(self) -> tuple[str, ...]:
        value = self._left.pop("stop", [])
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > 4 or not all(map(_is_stop, listed)):
            raise _unexpected("stop", value, "a text, or up to 4 of them, none of them empty")
        return tuple(listed)

    def include_usage(self) -> bool:
        options = self._left.pop("stream_options", {})
        if not isinstance(options, dict):
            raise _unexpected("stream_options", options, "an object")
        inner = _Fields(options)
        usage = inner.flag("include_usage")
        if inner.flag("include_obfuscation"):
            raise _wrong("stream_options", "include_obfuscation is not supported")
        inner.refuse_others()
        return usage

    def refuse_others(self) -> None:
        user = self._left.pop("user", "")
        if not isinstance(user, str):
            raise _unexpected("user", user, "a string")
        for name, value in self._left.items():
            if name not in self._NEUTRAL:
                raise Refusal(400, "unknown_field", f"there is no field {name!r:.100}", param=name[:100])
            if isinstance(value, bool) or value not in self._NEUTRAL[name]:
                raise _wrong(name, "it is not supported; leave it out")


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _unexpected(name: str, value: object, expected: str) -> Refusal:
    return _wrong(name, f"it is {value!r:.100}, expected {expected}")


def _wrong(name: str, message: str) -> Refusal:
    return Refusal(400, "bad_parameter", f"{name}: {message}", param=name)
