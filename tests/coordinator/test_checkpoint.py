"""A committed round is there as a whole or not at all, and says which file is wrong when it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from coordinator.errors import UserError
from coordinator.rounds.records import Checkpoint
from coordinator.runs.simulation_store import CheckpointStore
from strategies.params import Params, State

names = st.text("abw.", min_size=1, max_size=5)
params = st.dictionaries(
    names,
    npst.arrays(
        np.float32, npst.array_shapes(min_dims=0, max_dims=3, max_side=3), elements=st.floats(width=32)
    ),
    max_size=3,
)
streams = st.dictionaries(st.sampled_from(["control", "dual"]), params.filter(bool), min_size=1, max_size=2)
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text()
rounds = st.builds(
    Checkpoint,
    round=st.integers(0, 10_000),
    params=params,
    state=st.builds(State, params, st.dictionaries(st.text(max_size=5), scalars, max_size=3)),
    record=st.dictionaries(st.text(max_size=5), scalars, max_size=3),
    offsets=st.dictionaries(st.text(max_size=5), st.integers(0, 2**53), max_size=2),
    identity=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
    client_states=st.dictionaries(st.text(min_size=1, max_size=5), streams, max_size=3),
)


def committed(number: int = 1, *, clients: dict[str, float] | None = None) -> Checkpoint:
    """Round `number`, told apart by its numbers; `clients`: a control variate of each, by its value."""

    def filled(value: float) -> Params:
        return {"w": np.full(3, value, np.float32)}

    return Checkpoint(
        number,
        filled(number),
        State({"optimizer/w": np.full(3, -number, np.float32)}, {"step": number}),
        record={"round": number},
        offsets={"rounds.csv": 10 * number},
        identity={"data": "d"},
        client_states={name: {"control": filled(value)} for name, value in (clients or {}).items()},
    )


def load(folder: Path) -> Checkpoint:
    loaded = CheckpointStore(folder).load()
    assert loaded is not None
    return loaded


def frozen(value: Any) -> Any:
    """The value with its arrays as shape, dtype and bytes, to be compared to the bit."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.str, value.tobytes())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return frozen(vars(value)) if isinstance(value, Checkpoint | State) else value


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs").iterdir()}


def test_before_the_first_commit_there_is_nothing(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).load() is None


@given(now=rounds)
def test_loading_returns_what_was_committed(
    tmp_path_factory: pytest.TempPathFactory, now: Checkpoint
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    CheckpointStore(folder).commit(now)
    assert frozen(load(folder)) == frozen(now)


def test_client_states_add_up_over_rounds_and_the_last_one_counts(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.commit(committed(1, clients={"a": 1, "b": 1}))
    checkpoints.commit(committed(2, clients={"b": 2, "c": 2}))
    # Another process goes on from there.
    after = CheckpointStore(tmp_path)
    assert after.load() is not None
    after.commit(committed(3, clients={"c": 3}))
    controls = {name: s["control"]["w"][0] for name, s in load(tmp_path).client_states.items()}
    assert controls == {"a": 1, "b": 2, "c": 3}


def test_only_blobs_of_the_committed_round_stay(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for number in range(1, 6):
        checkpoints.commit(committed(number, clients={"a": number}))
    assert len(blobs(tmp_path)) == 3  # params, strategy state, client a
    assert load(tmp_path).round == 5


# Interruptions


def test_a_crash_before_the_pointer_moves_leaves_the_round_before(tmp_path: Path) -> None:
    """The blobs of the new round are there already, and half of another."""
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.commit(committed(1, clients={"a": 1}))
    pointer = (tmp_path / "checkpoint.json").read_bytes()
    checkpoints.commit(committed(2, clients={"a": 2}))
    newer = {path.name: path.read_bytes() for path in (tmp_path / "blobs").iterdir()}

    crashed = tmp_path / "crashed"
    CheckpointStore(crashed).commit(committed(1, clients={"a": 1}))
    assert (crashed / "checkpoint.json").read_bytes() == pointer
    for name, payload in newer.items():
        (crashed / "blobs" / name).write_bytes(payload)
    half = crashed / "blobs" / ".arrays.99.99.tmp"
    half.write_bytes(b"half")
    os.utime(half, (0, 0))
    (crashed / "checkpoint.json.99.tmp").write_bytes(b'{"format": 1, "rou')

    assert frozen(load(crashed)) == frozen(committed(1, clients={"a": 1}))
    resumed = CheckpointStore(crashed)
    resumed.load()
    resumed.commit(committed(2, clients={"a": 2}))
    assert blobs(crashed) == set(newer)
    assert frozen(load(crashed)) == frozen(committed(2, clients={"a": 2}))


# The kernel refuses to let a file of this process grow beyond a size: a disk that fills up midway.
FULL_DISK = """
import resource, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from coordinator.runs.simulation_store import CheckpointStore

checkpoints = CheckpointStore(Path(sys.argv[1]))
before = checkpoints.load()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
large = {sys.argv[2]: {"w": np.ones(5000, np.float32)}}
changed = {"params": large["params"]} if "params" in large else {"record": {"long": "x" * 5000}}
try:
    checkpoints.commit(replace(before, round=2, **changed))
except OSError as error:
    print("refused:", error.strerror)
# The run may go on, on a disk that has room again.
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
checkpoints.commit(replace(before, round=int(sys.argv[3])))
"""


@pytest.mark.parametrize("part", ["params", "record"])
def test_a_full_disk_keeps_the_round_before(tmp_path: Path, part: str) -> None:
    CheckpointStore(tmp_path).commit(committed(1, clients={"a": 1}))
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path, part, "1"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "refused: File too large\n"), done.stderr
    assert frozen(load(tmp_path)) == frozen(committed(1, clients={"a": 1}))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_commit_that_failed_does_not_show_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pointer could not be replaced; its client states must not count as committed."""
    checkpoints = CheckpointStore(tmp_path)
    checkpoints.commit(committed(1, clients={"a": 1}))
    replacing = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if target.name == "checkpoint.json":
            raise OSError(5, "Input/output error")
        return replacing(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.commit(committed(2, clients={"a": 2, "b": 2}))
    assert frozen(load(tmp_path)) == frozen(committed(1, clients={"a": 1}))
    monkeypatch.undo()
    checkpoints.commit(committed(2))
    assert frozen(load(tmp_path)) == frozen(
        replace(committed(2), client_states=committed(1, clients={"a": 1}).client_states)
    )


# Damage


def test_a_damaged_blob_is_named(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).commit(committed(1))
    digest = json.loads((tmp_path / "checkpoint.json").read_text())["params"]
    path = tmp_path / "blobs" / digest
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match=re.escape(str(path))) as caught:
        load(tmp_path)
    assert "the checkpoint is damaged" in str(caught.value)
    assert "start the run anew" in str(caught.value)


@pytest.mark.parametrize("part", ["params", "state"])
def test_a_missing_blob_is_named(tmp_path: Path, part: str) -> None:
    CheckpointStore(tmp_path).commit(committed(1))
    digest = json.loads((tmp_path / "checkpoint.json").read_text())[part]
    (tmp_path / "blobs" / digest).unlink()
    with pytest.raises(UserError, match=f"{digest} is missing"):
        load(tmp_path)


DAMAGE = [
    b"", b"{", b"null", b"[]", b"7", b'"x"', b"\xff\xfe\x00", b"[" * 100_000, b'{"format": 1}',
    b'{"format": 1, "round": 1, "params": 5, "state": [], "clients": 3, "record": {}, "offsets": {}, "identity": {}}',
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGE, ids=lambda content: repr(content[:14]))
def test_a_damaged_pointer_is_named(tmp_path: Path, content: bytes) -> None:
    CheckpointStore(tmp_path).commit(committed(1))
    (tmp_path / "checkpoint.json").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path / "checkpoint.json"))) as caught:
        load(tmp_path)
    assert "start the run anew" in str(caught.value)


@given(data=st.data())
def test_no_damage_to_the_pointer_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    CheckpointStore(folder).commit(committed(1, clients={"a": 1}))
    document = json.loads((folder / "checkpoint.json").read_text())
    key = data.draw(st.sampled_from(list(document)))
    document[key] = data.draw(
        st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
    )
    (folder / "checkpoint.json").write_text(json.dumps(document))
    try:
        load(folder)
    except UserError as error:
        assert str(folder / "checkpoint.json") in str(error)


def test_a_checkpoint_of_another_version_says_both(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).commit(committed(1))
    document = json.loads((tmp_path / "checkpoint.json").read_text())
    (tmp_path / "checkpoint.json").write_text(json.dumps({**document, "format": 2}))
    with pytest.raises(UserError, match="format 2, this version reads 1"):
        load(tmp_path)
