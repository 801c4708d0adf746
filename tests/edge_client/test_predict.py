"""The installed model is of use: predictions of files, and of other programs over a socket."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.infer.runtime import InvalidRows, load
from edge_client.ota import crash_counter, self_test_worker, slots, transitions
from edge_client.ota.transitions import Slot, SlotName
from edge_client.serving.lines import LINE_BYTES
from edge_client.wire import inference
from edge_client.wire.manifest import ManifestError
from tests.support.releases import released, rows

pytestmark = pytest.mark.slow

EDGE = Path(sys.executable).parent / "fedloop-edge"


def edge(*arguments: str | Path, state: Path) -> subprocess.CompletedProcess[str]:
    command = [EDGE, "--state-dir", state, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def install(state: Path, slot: SlotName, version: int, model: str = "digits") -> None:
    """Version `version` in a slot, made active, as an installation leaves it."""
    source, folder = released("static-int8").folder, state / "releases" / model / slot
    fresh = folder.with_suffix(".fresh")
    fresh.mkdir(parents=True)
    manifest = inference.from_json((source / "manifest.json").read_bytes())
    (fresh / "manifest.json").write_text(replace(manifest, model=model, version=version).to_json())
    shutil.copy(source / "model.tflite", fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    held = Slot(version, "rollout")
    pointer = slots.read(state, model)
    slots.write(
        state, replace(pointer, a=held, active="a") if slot == "a" else replace(pointer, b=held, active="b")
    )


def point(state: Path, slot: SlotName, model: str = "digits") -> None:
    slots.write(state, replace(slots.read(state, model), active=slot))


def expected(x: Any) -> list[int]:
    return [int(label) for label in load(released("static-int8").folder).predict(x).argmax(-1)]


def test_a_release_says_what_its_file_says() -> None:
    loaded = load(released("static-int8").folder)

    together, apart = loaded.predict(rows()[:9]), [loaded.predict(row[None])[0] for row in rows()[:9]]

    np.testing.assert_allclose(together, apart, atol=1e-3 * np.abs(together).max())
    assert together.shape == (9, 10) and together.dtype == np.float32
    assert loaded.predict(rows()[:0]).shape == (0, 10)


@pytest.mark.parametrize("x", [np.zeros((2, 8, 7)), np.zeros(()), np.full((1, 8, 8), "a")])
def test_rows_that_do_not_fit_are_refused(x: Any) -> None:
    with pytest.raises(InvalidRows, match="digits takes"):
        load(released("static-int8").folder).predict(x)


def test_a_file_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(released("static-int8").folder, tmp_path / "release")
    content = bytearray((folder / "model.tflite").read_bytes())
    content[-100] ^= 1
    (folder / "model.tflite").write_bytes(content)

    with pytest.raises(ManifestError, match=r"model\.tflite has SHA-256"):
        load(folder)


@pytest.mark.parametrize("kind", ["npy", "npz", "csv"])
def test_rows_of_a_file_are_predicted(kind: str, tmp_path: Path) -> None:
    x, path, state = rows()[:5], tmp_path / f"rows.{kind}", tmp_path / "state"
    if kind == "csv":
        names = ",".join([*(f"p{i}" for i in range(64)), "label"])
        lines = [",".join([*map(str, row.reshape(-1)), "one"]) for row in x]
        path.write_text("\n".join([names, *lines]) + "\n")
    elif kind == "npz":
        np.savez(path, x=x)
    else:
        np.save(path, x)
    install(state, "b", 4)

    done = edge("predict", path, "--json", *(["--leave-out", "label"] if kind == "csv" else []), state=state)

    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["model"], answer["version"]) == ("digits", 4)
    assert [each["label"] for each in answer["predictions"]] == expected(x)
    assert all(0.1 < each["probability"] <= 1 for each in answer["predictions"])


def test_a_data_set_of_the_device_is_read_as_its_evaluation_reads_it(tmp_path: Path) -> None:
    """The shades of digits are 0 to 16 in the file; the option `scale` is part of what the model was trained on."""
    x, state, config = rows()[:120], tmp_path / "state", tmp_path / "edge.toml"
    y = np.array(expected(x))
    y[::7] = (y[::7] + 1) % 10
    np.savez(tmp_path / "digits.npz", x=x[:20] * 16, y=y[:20], x_test=x * 16, y_test=y)
    install(state, "b", 4)
    config.write_text(
        f'state_dir = "{state}"\n[data.digits]\nkind = "numpy"\npath = "{tmp_path}/digits.npz"\nscale = 0.0625\n'
    )

    done = subprocess.run(
        [EDGE, "--config", config, "predict", "--data", "digits", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    unknown = subprocess.run(
        [EDGE, "--config", config, "predict", "--data", "digit"], capture_output=True, text=True, timeout=120
    )

    loaded = load(released("static-int8").folder)
    evaluated = self_test_worker._evaluate(loaded, x, y)
    answer = json.loads(done.stdout)
    assert len(answer["predictions"]) == 120
    assert answer["accuracy"] == evaluated["correct"] / evaluated["labels"] < 0.9
    assert unknown.returncode == 2 and "this device has no such data set; it has digits" in unknown.stderr


def test_a_mistake_of_a_person_is_one_message(tmp_path: Path) -> None:
    state, path = tmp_path / "state", tmp_path / "rows.npy"
    np.save(path, np.zeros((2, 3)))

    none = edge("predict", path, state=state)
    install(state, "a", 1)
    wrong_rows, no_file = edge("predict", path, state=state), edge("predict", "none.csv", state=state)
    install(state, "a", 1, model="other")
    which = edge("predict", path, state=state)

    for done, words in [
        (none, "this device has no release"),
        (wrong_rows, "rows are [3], digits:1 takes [8, 8]"),
        (no_file, "none.csv: No such file"),
        (which, "name one with --model: digits, other"),
    ]:
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr


@dataclass
class Serving:
    process: subprocess.Popen[str]
    path: Path

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(60)
            link.connect(str(self.path))
            with link.makefile("rwb") as file:
                yield file

    def ask(self, *requests: Any) -> list[dict[str, Any]]:
        """Each on one connection, answered in order; bytes go as they are."""
        with self.client() as file:
            return [requested(file, request) for request in requests]


def requested(file: Any, request: Any) -> dict[str, Any]:
    file.write(request if isinstance(request, bytes) else json.dumps(request).encode() + b"\n")
    file.flush()
    answer: dict[str, Any] = json.loads(file.readline())
    return answer


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Serving]:
    state, path = folder / "state", folder / "s"
    command = [EDGE, "--state-dir", state, "serve-model", "--socket", path, *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "runs digits" in line:
                break
        yield Serving(process, path)
    finally:
        process.kill()
        process.wait()


def test_the_socket_answers_in_order_and_belongs_to_its_user(tmp_path: Path) -> None:
    install(tmp_path / "state", "a", 2)
    x = rows()[:3]

    with serving(tmp_path) as service:
        mode = stat.S_IMODE(service.path.stat().st_mode)
        nested, flat = service.ask({"id": "n", "x": x.tolist()}, {"id": 2, "x": x.reshape(3, -1).tolist()})

    assert mode == 0o600
    assert nested == {**flat, "id": "n"} and flat["id"] == 2 and flat["model"] == "digits:2"
    assert flat["labels"] == expected(x)


BAD: Sequence[tuple[Any, str]] = [
    (b"\n", "not JSON"),
    (b"\xff\xfe\n", "not JSON"),
    (b"[" * 100_000 + b"\n", "not JSON"),
    ([1], "expected an object"),
    ({}, "x is missing"),
    ({"x": None}, "expected 1 to"),
    ({"x": []}, "expected 1 to"),
    ({"x": [[1, 2], [3]]}, "does not hold rows of numbers"),
    ({"x": [["a"] * 64]}, "takes float32"),
    ({"x": [[10**400] * 64]}, "takes float32"),
    (b'{"x": [[' + b",".join([b"NaN"] * 64) + b"]]}\n", "not a finite number"),
    ({"x": [[0.0] * 63]}, "digits takes"),
]


def test_bad_requests_are_answered_and_good_ones_go_on(tmp_path: Path) -> None:
    install(tmp_path / "state", "a", 2)
    good = {"id": 9, "x": rows()[:1].tolist()}

    with serving(tmp_path) as service:
        *answers, last = service.ask(*(request for request, _ in BAD), good)
        with service.client() as file:  # a request without end
            with contextlib.suppress(BrokenPipeError):
                file.write(b"[" * (LINE_BYTES + 1))
                file.flush()
            too_long = json.loads(file.readline())
        with service.client() as file:  # gone before its answer
            file.write(json.dumps(good).encode() + b"\n")
        (after,) = service.ask(good)

    for (_, words), answer in zip(BAD, answers, strict=True):
        assert words in answer["error"], answer
    assert "more than" in too_long["error"]
    assert last["labels"] == after["labels"] == expected(rows()[:1])


def test_many_clients_get_their_own_answers(tmp_path: Path) -> None:
    install(tmp_path / "state", "a", 2)
    x, got = rows()[:48], {}

    with serving(tmp_path, "--max-batch", "8", "--max-wait-ms", "50") as service:

        def client(first: int) -> None:
            requests = [{"id": at, "x": x[at : at + 1].tolist()} for at in range(first, first + 4)]
            got.update({answer["id"]: answer["labels"] for answer in service.ask(*requests)})

        threads = [threading.Thread(target=client, args=(first,)) for first in range(0, 48, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [got[at][0] for at in range(48)] == expected(x)


def test_a_new_release_is_picked_up_and_a_broken_one_is_not(tmp_path: Path) -> None:
    state = tmp_path / "state"
    request = {"x": rows()[:1].tolist()}
    install(state, "a", 1)

    with serving(tmp_path) as service, service.client() as file:
        first = requested(file, request)
        install(state, "b", 2)
        second = requested(file, request)
        shutil.copytree(
            state / "releases" / "digits" / "b", state / "releases" / "digits" / "a", dirs_exist_ok=True
        )
        (state / "releases" / "digits" / "a" / "model.tflite").write_bytes(b"broken")
        point(state, "a")
        broken = requested(file, request)
        point(state, "b")
        before = slots.read(state, "digits")
        slots.write(state, transitions.deactivate(before))
        taken_back = requested(file, request)
        slots.write(state, before)
        again = requested(file, request)

    assert "digits:2 does not run here" in taken_back["error"] and "told to run" in taken_back["error"]
    assert again["model"] == "digits:2"
    assert [each["model"] for each in (first, second, broken)] == ["digits:1", "digits:2", "digits:2"]
    assert first["labels"] == second["labels"] == broken["labels"]


def test_a_service_that_is_ended_answers_what_it_has_and_removes_its_socket(tmp_path: Path) -> None:
    install(tmp_path / "state", "a", 1)

    with (
        serving(tmp_path, "--max-wait-ms", "1000") as service,
        service.client() as idle,
        service.client() as file,
    ):
        requested(idle, {"x": rows()[:1].tolist()})
        file.write(json.dumps({"id": 5, "x": rows()[:2].tolist()}).encode() + b"\n")
        file.flush()
        requested(idle, [])  # answered at once, while the other waits for company
        service.process.send_signal(signal.SIGTERM)
        answer, end = json.loads(file.readline()), file.readline()
        status = service.process.wait(60)

    assert (answer["id"], answer["labels"], end, status) == (5, expected(rows()[:2]), b"", 0)
    assert not service.path.exists()
    assert crash_counter.models(tmp_path / "state") == []


def test_a_socket_that_is_served_or_no_socket_is_not_taken(tmp_path: Path) -> None:
    install(tmp_path / "state", "a", 1)
    (tmp_path / "file").write_text("mine")

    with serving(tmp_path) as service:
        second = edge("serve-model", "--socket", service.path, state=tmp_path / "state")
        other = edge("serve-model", "--socket", tmp_path / "file", state=tmp_path / "state")
        assert service.ask({"x": rows()[:1].tolist()})[0]["labels"]
    left = service.path.exists()  # it was killed
    assert crash_counter.models(tmp_path / "state") == ["digits"], "and that is counted"
    with serving(tmp_path) as again:
        assert again.ask({"x": rows()[:1].tolist()})[0]["labels"]

    assert second.returncode == other.returncode == 2 and left
    assert "another service listens" in second.stderr and "another file is there" in other.stderr
    assert (tmp_path / "file").read_text() == "mine"
