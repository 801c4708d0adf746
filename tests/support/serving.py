"""`fedloop serving start` as a process, and models to serve."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import urllib3

from coordinator.serving.resources.processes import cpu_seconds, tree
from edge_client.processes.process import tie_to_parent
from edge_client.wire.preprocessing import TextSchema
from edge_client.wire.schema import SCHEMA_NAME, DataSchema
from tests.support.cli import FEDLOOP

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz ")


class Server:
    """A server that runs. `place`: what it announced."""

    def __init__(self, process: subprocess.Popen[bytes], place: Mapping[str, Any]) -> None:
        self.process = process
        self.place = place
        self.home = Path(place["home"])
        self._pool = urllib3.PoolManager(maxsize=4, retries=False, timeout=300)

    @property
    def url(self) -> str:
        return str(self.place["url"])

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        if path.startswith("/fedloop/"):
            headers["Authorization"] = f"Bearer {(self.home / 'management.token').read_text().strip()}"
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        answer = self._pool.request(method, self.url + path, body=content, headers=headers)
        return answer.status, json.loads(answer.data) if answer.data[:1] in b"{[" else answer.data

    def deployed(self, name: str, model: Path | str, **settings: Any) -> dict[str, Any]:
        """The status of a deployment that is accepted."""
        status, answer = self.deploy(name, model, **settings)
        assert status == 200, answer
        found: dict[str, Any] = answer
        return found

    def deploy(self, name: str, model: Path | str, **settings: Any) -> tuple[int, Any]:
        return self.call("PUT", f"/fedloop/v1/deployments/{name}", {"model": str(model), **settings})

    def status(self, name: str) -> dict[str, Any]:
        listed = self.call("GET", "/fedloop/v1/deployments")[1]["deployments"]
        return next(each for each in listed if each["name"] == name)

    def infer(self, name: str, x: npt.NDArray[Any], path: str = "", **parameters: Any) -> tuple[int, Any]:
        """Status and answer for FP32 rows `x`."""
        tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
        return self.call(
            "POST", path or f"/v2/models/{name}/infer", {"inputs": [tensor], "parameters": parameters}
        )

    def cpu_seconds(self) -> float:
        """Of the front and all processes below it."""
        return cpu_seconds(self.process.pid)


@contextmanager
def serving(
    home: Path, *arguments: str, program: Sequence[str] = (str(FEDLOOP),), **environment: str
) -> Iterator[Server]:
    """A server on a free port. `program`: the command, or what stands for it."""
    command = [*program, "serving", "start", *arguments, "--home", str(home), "--listen", "127.0.0.1:0"]
    with (home.parent / f"{home.name}.log").open("ab") as log:
        process = subprocess.Popen(
            tie_to_parent(command), stdout=subprocess.PIPE, stderr=log, env={**os.environ, **environment}
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (home.parent / f"{home.name}.log").read_text()[-3000:]
        yield Server(process, json.loads(line))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def torch_model(folder: Path, name: str = "mlp", seed: int = 0, **changes: Any) -> Path:
    """The folder of an untrained model of PyTorch, as `fedloop predict` and serving take it."""
    import safetensors.numpy

    from models import zoo
    from models.pretrain.params import params_of

    described: dict[str, Any] = {
        "name": name,
        "options": {},
        "input_shape": [8, 8],
        "classes": 10,
        "input_dtype": "float32",
        "task": "classification",
        **changes,
    }
    spec = zoo.get(
        name,
        input_shape=tuple(described["input_shape"]),
        classes=described["classes"],
        input_dtype=described["input_dtype"],
        task=described["task"],
        **described["options"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(params_of(spec.build(seed))))
    (folder / "model.json").write_text(json.dumps({**described, "options": dict(spec.options)}))
    return folder


def letters_model(folder: Path, name: str, classes: Sequence[str] = ()) -> Path:
    """As `torch_model`, of texts of up to 32 lower-case letters and spaces. Without classes it continues them."""
    task = {"classes": len(classes)} if classes else {"classes": len(LETTERS), "task": "next_token"}
    options = {"vocab": len(LETTERS)} if classes else {}
    torch_model(folder, name, input_shape=[32], input_dtype="int32", options=options, **task)
    text = TextSchema("characters", "class" if classes else "next_token", LETTERS)
    schema = DataSchema("text", (32,), "int32", classes=tuple(classes), text=text)
    (folder / SCHEMA_NAME).write_text(schema.to_json())
    return folder


def rows(count: int, shape: tuple[int, ...] = (8, 8), seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, *shape), np.float32)


def logits_of(answer: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    assert "outputs" in answer, answer
    found = next(each for each in answer["outputs"] if each["name"] == "logits")
    return np.asarray(found["data"], np.float32).reshape(found["shape"])


def memory_bytes(pid: int) -> int:
    """Of a process and all below it, as if they were alone on the machine: what they share is counted once.

    Proportional set sizes (PSS), except that what is mapped of a file counts by the process that has most of it in memory, because
    PSS also divides it among strangers that map the same library.
    """
    kilobytes = 0
    files: Counter[str] = Counter()
    for each in tree(pid):
        with suppress(OSError):
            kilobytes += sum(
                int(line.split()[1])
                for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
                if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
            files |= _read_of_files(each)  # the larger one of each
    return 1024 * (kilobytes + files.total())


def _read_of_files(pid: int) -> Counter[str]:
    """kB that a process has in memory of each file it maps, without pages that it has written to."""
    found: Counter[str] = Counter()
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, rest = line.partition(" ")
        if "-" in key:  # the address of the next mapping
            fields = line.split(maxsplit=5)
            path = fields[5] if len(fields) == 6 and fields[5].startswith("/") else ""
        elif path and not path.startswith(("/dev/", "/memfd:")) and key in ("Rss:", "Anonymous:"):
            found[path] += int(rest.split()[0]) * (1 if key == "Rss:" else -1)
    return found


class Background:
    """Runs a function in a thread; `result` waits for it."""

    def __init__(self, function: Any) -> None:
        self._found: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,))
        self._thread.start()

    def _run(self, function: Any) -> None:
        try:
            self._found = function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found
