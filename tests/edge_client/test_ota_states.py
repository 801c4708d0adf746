"""The real installer and the real trials over any sequence of offers, failures, power cuts and rotten files: a version that
proved itself is always there.

Only what is outside the device is made up: the signed repository, the connection, and how a self-test ends. What lies in the
state folder is real.

    FEDLOOP_TEST_LONG=1 .venv/bin/pytest tests/edge_client/test_ota_states.py     many more sequences
"""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tuf.api.metadata import TargetFile

from edge_client import config, failpoints
from edge_client.ota import (
    download,
    install,
    releases,
    self_test,
    slots,
)
from edge_client.ota.errors import Rejected
from edge_client.ota.transitions import Pointer, SlotName
from edge_client.transport.failures import ServerRefused, Unreachable
from edge_client.wire import inference
from edge_client.wire.device import ReleaseOffer
from edge_client.wire.manifest import FileSpec
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME, Rollout
from tests.support import released
from tests.support.edge import Clock
from tests.support.long import LONG

MODEL = "digits"
WRONG = 4
"""The version whose answers are wrong on this device."""

versions = st.integers(1, 5)
Trouble = Literal["none", "missing", "line cut"]
moments = st.sampled_from([None] * 12 + [(name, 1) for name in failpoints.NAMES] + [("install.part", 3)])
rarely = st.sampled_from([False, False, False, True])


class PowerCut(BaseException):
    """Nothing of the daemon runs on."""


@cache
def files(version: int) -> dict[str, bytes]:
    """A release's, by name."""
    content = random.Random(version // 2).randbytes(5_000) + random.Random(version).randbytes(3_000)
    manifest = replace(
        _manifest(), version=version, file=FileSpec(hashlib.sha256(content).hexdigest(), len(content))
    )
    return {MANIFEST_NAME: manifest.to_json().encode(), MODEL_NAME: content}


@cache
def _manifest() -> inference.InferenceManifest:
    with tempfile.TemporaryDirectory() as folder:
        made = released.release_folder(Path(folder), 1)
        return inference.from_json((made / MANIFEST_NAME).read_bytes())


class SignedRepository:
    """All versions are released, and the device is to run whichever it is offered."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def refresh(self) -> None:
        pass

    def signed_rollout(self, offer: ReleaseOffer, device: str) -> Rollout:
        return Rollout(offer.rollout, offer.version, offer.action, offer.force)

    def target(self, path: str) -> TargetFile:
        _, version, name = path.split("/")
        content = files(int(version))[name]
        return TargetFile(len(content), {"sha256": hashlib.sha256(content).hexdigest()}, path)


@dataclass
class Stream:
    first: int
    chunks: Iterator[bytes]


@dataclass
class Connection:
    trouble: Trouble = "none"

    @contextmanager
    def stream(self, path: str, first: int = 0, last: int | None = None) -> Iterator[Stream]:
        if self.trouble == "missing":
            raise ServerRefused(404, "not_found", "not there")
        _, version, name = path.rsplit("/", 2)
        content = files(int(version))[name.partition(".")[2]]
        yield Stream(first, self._chunks(content[first : None if last is None else last + 1]))

    def _chunks(self, content: bytes) -> Iterator[bytes]:
        for at in range(0, len(content), 2_000):
            if at and self.trouble == "line cut":
                raise Unreachable("cut")
            yield content[at : at + 2_000]


class Device(RuleBasedStateMachine):
    @initialize()
    def first_start(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="fedloop-states-"))
        self.state_dir = self.home / "state"
        self.config = config.load(None, {"HOME": str(self.home)}, [f"state_dir={self.state_dir}"]).config
        self.clock, self.busy, self.had_proved = Clock(), False, False
        self.offers = 0
        self.start()
        self.offer(1, "none", False, None)
        self.last()

    @rule(
        version=versions,
        trouble=st.sampled_from(["none", "none", "missing", "line cut"]),
        busy=rarely,
        cut=moments,
    )
    def offer(self, version: int, trouble: Trouble, busy: bool, cut: tuple[str, int] | None) -> None:
        self.busy = busy
        self.receive(ReleaseOffer(self.rollout(), MODEL, version, force=version == WRONG), trouble, cut)

    @rule(busy=rarely, cut=moments)
    def go_back(self, busy: bool, cut: tuple[str, int] | None) -> None:
        self.busy = busy
        if (spare := self.pointer.spare) is not None:
            self.receive(ReleaseOffer(self.rollout(), MODEL, spare.version, "roll_back"), "none", cut)

    @rule()
    def last(self) -> None:
        self.clock.seconds += self.config.releases.trial_seconds
        self.models.maintain()

    @rule(times=st.integers(1, 5), busy=rarely, cut=moments)
    def power_cuts(self, times: int, busy: bool, cut: tuple[str, int] | None) -> None:
        self.busy = busy
        for _ in range(times):
            self.start(cut)

    @rule()
    def restart(self) -> None:
        self.busy = False
        self.models.end()
        self.start()

    @rule(name=st.sampled_from(["a", "b"]), file=st.sampled_from([MANIFEST_NAME, MODEL_NAME]), happens=rarely)
    def rot(self, name: SlotName, file: str, happens: bool) -> None:
        if not happens:
            return
        path = slots.slot_folder(self.state_dir, MODEL, name) / file
        if path.exists():
            content = bytearray(path.read_bytes())
            content[len(content) // 2 : len(content) // 2 + 2] = b"\0\0"
            path.write_bytes(content)
        self.had_proved = bool(self.sound_and_proved())

    @rule(name=st.sampled_from([slots.POINTER_NAME, slots.COPY_NAME]), happens=rarely)
    def rot_of_a_pointer(self, name: str, happens: bool) -> None:
        path = slots.folder_of(self.state_dir, MODEL) / name
        if happens and path.exists():
            content = path.read_bytes()
            path.write_bytes(content.replace(b"true", b"tru\0").replace(b"null", b"1111"))
        self.had_proved = bool(self.sound_and_proved())

    @rule()
    def heals(self) -> None:
        """Whatever rotted: after a start and an offer a version runs whose files are right."""
        self.restart()
        self.receive(ReleaseOffer(self.rollout(), MODEL, 1, force=True), "none", None)
        pointer = self.pointer
        assert pointer.active is not None and pointer.running is not None
        assert self.is_sound(pointer.active, pointer.running.version)

    @invariant()
    def a_version_that_proved_itself_is_there(self) -> None:
        proved = self.sound_and_proved()
        assert proved or not self.had_proved, self.pointer
        self.had_proved = bool(proved)

    @invariant()
    def something_runs_where_something_could(self) -> None:
        pointer = self.pointer
        assert pointer.active is not None or (pointer.a is None and pointer.b is None)
        if pointer.running is not None:
            assert pointer.running.version != WRONG

    def teardown(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)

    # -- how --

    @property
    def pointer(self) -> Pointer:
        return slots.read(self.state_dir, MODEL)

    def rollout(self) -> str:
        self.offers += 1
        return f"rollout-{self.offers}"

    def sound_and_proved(self) -> list[int]:
        pointer = self.pointer
        held = [(slot, name) for name in ("a", "b") if (slot := pointer.slot(name)) and slot.proved]
        return [slot.version for slot, name in held if self.is_sound(name, slot.version)]

    def is_sound(self, name: SlotName, version: int) -> bool:
        folder = slots.slot_folder(self.state_dir, MODEL, name)
        return all(
            (folder / file).exists() and (folder / file).read_bytes() == content
            for file, content in files(version).items()
        )

    def self_test(self, job: self_test.SelfTestJob, check_cancelled: Any = None) -> self_test.SelfTestResult:
        if self.busy:
            raise Rejected("memory", "not now")
        try:
            version = inference.from_json((job.folder / MANIFEST_NAME).read_bytes()).version
            content = (job.folder / MODEL_NAME).read_bytes()
        except (OSError, ValueError):
            raise Rejected("bad_artifact", "unreadable") from None
        if content != files(version)[MODEL_NAME] or version == WRONG:
            raise Rejected("self_test", "wrong answers")
        return self_test.SelfTestResult(1.0)

    def receive(self, offer: ReleaseOffer, trouble: Trouble, cut: tuple[str, int] | None) -> None:
        with self.until_cut(cut), mock.patch.object(install, "Repository", SignedRepository):
            self.models.update_offers([offer])
            for due in self.models.offers():
                with suppress(Unreachable, ServerRefused):
                    self.models.install("device", Connection(trouble), due.offer, lambda: None)  # type: ignore[arg-type]

    def start(self, cut: tuple[str, int] | None = None) -> None:
        self.models = releases.Releases(self.config, self.clock.now, random.Random(1), self.self_test)
        with self.until_cut(cut):
            self.models.begin()

    @contextmanager
    def until_cut(self, cut: tuple[str, int] | None) -> Iterator[None]:
        """Power fails the n-th time that a moment is reached, and the daemon is started again."""
        left = cut[1] if cut is not None else 0

        def reach(name: str) -> None:
            nonlocal left
            if cut is not None and name == cut[0]:
                left -= 1
                if left == 0:
                    raise PowerCut

        patched = [mock.patch.object(module, "reach", reach) for module in (install, releases, download)]
        try:
            with patched[0], patched[1], patched[2]:
                yield
        except PowerCut:
            self.start()


_PHASES = tuple(Phase) if LONG else (Phase.explicit, Phase.reuse, Phase.generate)
"""Shrinking a sequence that fails takes minutes."""

TestDevice = pytest.mark.slow(pytest.mark.long(Device.TestCase))
TestDevice.settings = settings(
    max_examples=3_000 if LONG else 60,
    stateful_step_count=20,
    deadline=None,
    phases=_PHASES,
)
