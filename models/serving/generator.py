"""Generation in a worker: requests and events of `models.serving.generation` as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.serving.texts import decode, token_name
from edge_client.wire import schema as schemas
from edge_client.wire.preprocessing import TextSchema
from models.pretrain import plan as plans
from models.serving.generation.engine import Engine, Options
from models.serving.generation.parallel import Parallel, require_plan
from models.serving.generation.request import Event, InvalidRequest, Request, Sampling
from models.serving.generation.text import INCOMPLETE
from models.serving.opening import OpenedModel


class Generator:
    """`options`: fields of `Options`, and `plan`, by which parts of the model compute in processes of their own, or empty; `schema`: the
    model's data schema as a document, whose texts give tokens a text; `params`: the model's file of params.

    Raises:
        CannotGenerate: the model is none that generates. PlanError: it cannot be split so.
    """

    def __init__(
        self, model: OpenedModel, options: Mapping[str, Any], schema: Mapping[str, Any] | None, params: Path
    ) -> None:
        text = None if schema is None else schemas.from_document(schema).text
        self._schema = text if text is not None and text.predicts == "next_token" else None
        sizes = Options(**{key: value for key, value in options.items() if key != "plan"})
        ends = () if self._schema is None else (self._schema.end, *self._schema.stops)
        self._ends = tuple(end for end in ends if end is not None)
        executor = None
        if options["plan"]:
            plan = plans.parse(options["plan"])
            require_plan(plan, model.spec)
            executor = Parallel(model.spec.described(), params, plan, sizes.block_tokens)
        self._engine = Engine(model.module, model.spec, sizes, _decoder(self._schema), executor)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self._engine.length

    def add(self, values: Mapping[str, Any]) -> list[list[Any]]:
        """Accepts a request; events that it has at once, which is the reason why it cannot be answered."""
        request = Request(
            values["id"],
            tuple(values["prompt"]),
            values["max_tokens"],
            Sampling(**values["sampling"]),
            tuple(values["stop"]),
            self._ends,
        )
        try:
            self._engine.add(request)
        except InvalidRequest as error:
            return [[values["id"], "refused", error.reason, str(error)]]
        return []

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def step(self) -> list[list[Any]]:
        """The events of the next tokens, each [id, text, tokens, log-probabilities, most probable, end, cached tokens]."""
        return [self._event(each) for each in self._engine.step()]

    def statistics(self) -> dict[str, int]:
        return dict(vars(self._engine.statistics))

    def _event(self, event: Event) -> list[Any]:
        tokens = [] if event.token is None else [self._name(event.token)]
        return [
            event.id,
            event.text if self._schema is not None or event.token is None else f"{event.token} ",
            tokens,
            [event.logprob] if tokens else [],
            [[self._name(token), logprob] for token, logprob in event.top],
            event.finish_reason,
            event.cached_prompt_tokens,
        ]

    def _name(self, token: int) -> str:
        if self._schema is None:
            return str(token)
        text = decode([token], self._schema)
        return token_name(self._schema, token) if INCOMPLETE in text or not text else text


def _decoder(schema: TextSchema | None) -> Any:
    return None if schema is None else lambda ids: decode(ids, schema)
