"""The socket under clients that mean harm or are in trouble, and under models that do."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from edge_client import config
from edge_client.ota import crash_counter, slots, transitions
from edge_client.ota.releases import Releases
from edge_client.ota.self_test import SelfTestResult
from edge_client.ota.transitions import Pointer, Slot
from edge_client.serving import lines
from edge_client.serving import service as module
from edge_client.serving.active import RETRY_SECONDS
from edge_client.serving.listening import listening
from edge_client.serving.service import Batching, Service
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MODEL_NAME
from edge_client.wire.schema import ColumnSchema, DataSchema
from tests.support import released
from tests.support.edge import Clock

WAIT = Batching(max_batch=16, max_wait_seconds=0.5)


@asynccontextmanager
async def serving(service: Service, path: Path) -> AsyncIterator[None]:
    with listening(path) as listener:
        task = asyncio.create_task(service.serve(listener))
        try:
            yield
        finally:
            service.end()
            await asyncio.wait_for(task, 60)


async def requested(path: Path, request: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(json.dumps(request).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


def rows(count: int) -> list[list[float]]:
    found: list[list[float]] = released.digits()[0][:count].tolist()
    return found


def test_a_problem_of_one_row_is_reported_to_its_client_alone(tmp_path: Path) -> None:
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, WAIT)

    async def run() -> tuple[dict[str, Any], ...]:
        async with serving(service, tmp_path / "s"):
            # 3e38 is a float32, and what the model makes of it is none.
            requests = ({"x": rows(2)}, {"x": [[3e38] * 64]}, {"x": rows(1)})
            return tuple(await asyncio.gather(*(requested(tmp_path / "s", each) for each in requests)))

    two, wrong, one = asyncio.run(run())
    assert service.counts.batches < 3, "they came together"
    assert two["labels"] == [0, 1] and one["labels"] == [0]
    assert "not finite" in wrong["error"]


def test_rows_by_column_name_are_answered_as_arrays_are(tmp_path: Path) -> None:
    columns = tuple(ColumnSchema(f"p{place}") for place in range(64))
    schema = DataSchema("table", (64,), "float32", tuple("abcdefghij"), columns, "digit")
    folder = released.release_folder(tmp_path / "release", 3, schema=schema)
    service = Service(lambda: folder, WAIT)
    natural = [{f"p{place}": value for place, value in reversed(list(enumerate(row)))} for row in rows(2)]

    async def run() -> list[dict[str, Any]]:
        async with serving(service, tmp_path / "s"):
            requests = ({"x": rows(2)}, {"rows": natural}, {"rows": [{"p0": 1}]}, {"rows": natural, "x": []})
            return [await requested(tmp_path / "s", each) for each in requests]

    arrays, named, short, both = asyncio.run(run())
    assert named["labels"] == arrays["labels"] == [0, 1] and named["classes"] == ["a", "b"]
    assert named["probabilities"] == arrays["probabilities"] and "classes" not in arrays
    assert "no column" in short["error"] and "send one of them" in both["error"]


def test_who_does_not_read_its_answers_keeps_no_service_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREAD_SECONDS", 0.2)
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, Batching(1, 0.0))

    async def run() -> dict[str, Any]:
        async with serving(service, tmp_path / "s"):
            _, writer = await asyncio.open_unix_connection(tmp_path / "s")
            with suppress(ConnectionError):  # cut off in the end
                for _ in range(5_000):
                    writer.write(json.dumps({"id": "x" * 10_000}).encode() + b"\n")
                    await writer.drain()
            return await requested(tmp_path / "s", {"x": rows(1)})

    assert asyncio.run(run())["labels"] == [0]


def test_connections_are_limited_and_those_that_are_there_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, Batching(1, 0.0))

    async def run() -> list[dict[str, Any]]:
        async with serving(service, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b'{"x": [')  # half a request
            _, idle = await asyncio.open_unix_connection(tmp_path / "s")
            third, _ = await asyncio.open_unix_connection(tmp_path / "s")
            refused = json.loads(await third.readline())
            assert await third.read() == b""
            writer.write(json.dumps(rows(1)[0]).encode() + b"]}\n")
            answer = json.loads(await reader.readline())
            idle.close()
            return [refused, answer]

    refused, answer = asyncio.run(run())
    assert refused["error"] == "more than 2 connections"
    assert answer["labels"] == [0]


def test_requests_that_do_not_end_take_no_more_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "HELD_BYTES", 3 * lines.BLOCK_BYTES)
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, Batching(1, 0.0))
    half = b'{"x": [' + b"1," * lines.BLOCK_BYTES

    async def run() -> list[str]:
        async with serving(service, tmp_path / "s"):
            made = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(4)]
            for _, writer in made:
                writer.write(half)
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(reader.readline()) for reader, _ in made],
                return_when=asyncio.FIRST_COMPLETED,
            )
            refused = [json.loads(each.result())["error"] for each in done]
            answer = await requested(tmp_path / "s", {"x": rows(1)})  # small ones pass meanwhile
            assert answer["labels"] == [0]
            for _, writer in made:
                writer.close()
            await asyncio.sleep(0)
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s", limit=2**20)
            writer.write(json.dumps({"id": "x" * len(half), "x": rows(1)}).encode() + b"\n")
            assert json.loads(await reader.readline())["labels"] == [0], "their room is free again"
            writer.close()
            return refused

    assert all("try again" in each for each in asyncio.run(run()))


def test_a_request_has_so_long_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_SECONDS", 0.2)
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, Batching(1, 0.0))

    async def run() -> dict[str, Any]:
        async with serving(service, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(b'{"x": [')
            refused: dict[str, Any] = json.loads(await reader.readline())
            assert await reader.read() == b""
            return refused

    assert "was incomplete" in asyncio.run(run())["error"]


def test_a_release_that_could_not_be_opened_is_tried_again_and_complained_of_once(tmp_path: Path) -> None:
    active, clock, message = [released.release_folder(tmp_path / "a", 1)], Clock(), []  # type: ignore[var-annotated]
    service = Service(lambda: active[0], Batching(1, 0.0), message.append, now=clock.now)
    later = released.release_folder(tmp_path / "b", 2, "second")
    content = (later / MODEL_NAME).read_bytes()
    (later / MODEL_NAME).write_bytes(b"half of it")

    async def run() -> list[str]:
        async with serving(service, tmp_path / "s"):

            async def model() -> str:
                return str((await requested(tmp_path / "s", {"x": rows(1)}))["model"])

            active[0] = later
            found = [await model(), await model()]
            (later / MODEL_NAME).write_bytes(content)
            found.append(await model())
            clock.seconds += RETRY_SECONDS
            return [*found, await model()]

    assert asyncio.run(run()) == ["digits:1", "digits:1", "digits:1", "digits:2"]
    assert len([line for line in message if "goes on with digits:1" in line]) == 1


# -- models that end whoever predicts with them --


def two_versions(state: Path) -> Pointer:
    """Version 2 runs and has proved itself, version 1 is in the other slot."""
    for version, name in ((1, "a"), (2, "b")):
        released.release_folder(state / "releases" / "digits" / name, version)
    held = Pointer("digits", "b", Slot(1, "r1"), Slot(2, "r2"))
    slots.write(state, held)
    return held


def died(state: Path, clock: Clock, times: int, socket: str = "s") -> None:
    """So often a service opened the active version and was never heard of again."""
    for _ in range(times):
        crash_counter.StartCounter(state, state / socket, clock.now).count(
            state / "releases" / "digits" / "b"
        )


def releases(state: Path, clock: Clock) -> Releases:
    made = config.load(None, {"HOME": str(state)}, [f"state_dir={state}"]).config
    return Releases(made, clock.now, random.Random(1), lambda *_: SelfTestResult(1.0))


def test_a_model_that_ends_its_service_again_and_again_goes(tmp_path: Path) -> None:
    two_versions(tmp_path)
    clock = Clock()
    daemon = releases(tmp_path, clock)
    died(tmp_path, clock, crash_counter.MAX_STARTS)
    assert daemon.maintain() == []
    died(tmp_path, clock, 1)
    (note,) = daemon.maintain()
    assert "digits:2 is no longer used" in note and "(crash_loop); version 1 runs again" in note
    pointer = slots.read(tmp_path, "digits")
    assert pointer.running == Slot(1, "r1")
    assert pointer.failure(2) is not None
    assert daemon.maintain() == []
    assert crash_counter.models(tmp_path) == [], "nothing is counted of what does not run"


@pytest.mark.parametrize("ends", ["lasts", "is told to end", "is another service"])
def test_starts_that_went_well_or_are_others_do_not_count(tmp_path: Path, ends: str) -> None:
    held = two_versions(tmp_path)
    clock = Clock()
    daemon = releases(tmp_path, clock)
    died(tmp_path, clock, crash_counter.MAX_STARTS)
    if ends == "is another service":
        died(tmp_path, clock, 1, "other")
    else:
        folder = tmp_path / "releases" / "digits" / "b"
        service = Service(
            lambda: folder,
            Batching(1, 0.0),
            starts=crash_counter.StartCounter(tmp_path, tmp_path / "s", clock.now),
            now=clock.now,
        )

        async def run() -> None:
            if ends == "lasts":
                clock.seconds += crash_counter.LASTING_SECONDS
            async with serving(service, tmp_path / "s"):
                while ends == "lasts" and crash_counter.models(tmp_path):
                    await asyncio.sleep(0.01)

        asyncio.run(run())
        assert crash_counter.models(tmp_path) == []
        died(tmp_path, clock, 1)
    assert daemon.maintain() == []
    assert slots.read(tmp_path, "digits") == held


def test_a_service_that_says_why_it_does_not_run_is_no_crash(tmp_path: Path) -> None:
    two_versions(tmp_path)
    folder = tmp_path / "releases" / "digits" / "b"
    starts = crash_counter.StartCounter(tmp_path, tmp_path / "s")
    (folder / MODEL_NAME).write_bytes(b"damaged")
    with pytest.raises(ManifestError):
        Service(lambda: folder, Batching(1, 0.0), starts=starts)
    assert crash_counter.models(tmp_path) == []


def test_a_fault_in_the_service_ends_it_and_leaves_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = released.release_folder(tmp_path / "release", 3)
    service = Service(lambda: folder, Batching(1, 0.0))

    async def run() -> bytes:
        async with serving(service, tmp_path / "s"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            monkeypatch.setattr(service._active, "_find", lambda: 1 / 0)
            writer.write(json.dumps({"x": rows(1)}).encode() + b"\n")
            return await reader.read()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())
    assert not (tmp_path / "s").exists()


def test_without_another_version_none_runs(tmp_path: Path) -> None:
    pointer = two_versions(tmp_path)
    slots.write(tmp_path, transitions.begin_install(pointer, _offer()))
    clock = Clock()
    died(tmp_path, clock, crash_counter.MAX_STARTS + 1)
    (note,) = releases(tmp_path, clock).maintain()
    assert "there is no other" in note
    assert slots.read(tmp_path, "digits").active is None


def _offer() -> Any:
    from edge_client.wire.device import ReleaseOffer

    return ReleaseOffer("r3", "digits", 3)
