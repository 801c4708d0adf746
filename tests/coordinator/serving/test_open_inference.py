"""Requests that Schemathesis generates from the OpenAPI document of the Open Inference Protocol find nothing wrong."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.serving import Server, rows, serving, torch_model

pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "open-inference.yaml"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
QUICK, LARGE = 10, 60
"""Requests to each operation, of either kind: as the document says, and otherwise."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serving")
    with serving(folder / "home") as running:
        status, answer = running.deploy("digits", torch_model(folder / "mlp"), slo_ms=60_000)
        assert status == 200, answer
        yield running


@pytest.fixture(scope="module")
def schema() -> Any:
    return schemathesis.openapi.from_dict(yaml.safe_load(DOCUMENT.read_text("utf-8")))


@pytest.fixture(scope="module")
def known(server: Server) -> dict[str, str]:
    """Parameters of paths that exist."""
    return {"model": "digits", "version": server.status("digits")["version"]}


@pytest.mark.parametrize("examples", [QUICK, pytest.param(LARGE, marks=pytest.mark.extended)])
def test_no_generated_request_finds_anything(
    server: Server, schema: Any, known: dict[str, str], examples: int
) -> None:
    sent = Counter[str]()
    pids = server.status("digits")["pids"]
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for operation, mode in itertools.product(operations, modes):

        def send(case: Any, named: bool) -> None:
            if named:
                case.path_parameters |= {name: known[name] for name in case.path_parameters}
            case.call_and_validate(base_url=server.url, checks=CHECKS)
            sent[case.operation.label] += 1

        with suppress(Unsatisfiable):  # nothing is wrong where nothing is asked
            bounded(examples)(
                given(case=operation.as_strategy(generation_mode=mode), named=st.booleans())(send)
            )()
    assert len(sent) == len(operations)
    assert server.status("digits")["pids"] == pids
    assert server.infer("digits", rows(2))[0] == 200


def bounded(examples: int) -> settings:
    """The quick edition sends the same requests every time."""
    return settings(
        max_examples=examples, derandomize=examples == QUICK, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def test_every_answer_is_as_the_document_says(server: Server, schema: Any, known: dict[str, str]) -> None:
    """Also those with predictions, which no generated request gets."""
    x = rows(2)
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    answered = Counter[int]()
    for operation in (found.ok() for found in schema.get_all_operations()):
        names = {each.name for each in operation.path_parameters}
        case = operation.Case(
            path_parameters={name: known[name] for name in names},
            body={"id": "7", "inputs": [tensor], "outputs": [{"name": "logits"}]}
            if "infer" in operation.path
            else {},
            media_type="application/json",
        )
        answered[case.call_and_validate(base_url=server.url, checks=CHECKS[:4]).status_code] += 1
    assert set(answered) == {200}
