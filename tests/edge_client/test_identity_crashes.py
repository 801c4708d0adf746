"""The identity on disk when the power goes at any step: whole, the old one or the new one, and done by a repetition."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_client.errors import UserError
from edge_client.transport import identity
from tests.support.edge import enrolled
from tests.support.fake_coordinator import FakeCoordinator

STEPS = (
    (identity, "write_durably"),
    (identity, "sync_folder"),
    (Path, "symlink_to"),
    (Path, "replace"),
    (Path, "rename"),
    (Path, "unlink"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
)


class PowerCut(BaseException):
    pass


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator().running() as fake:
        yield fake


def cut_at(number: int, do: Callable[[], object]) -> bool:
    """Does it, with the power cut before the step of that number; whether that step was reached."""
    counter = itertools.count(1)

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if next(counter) == number:
                raise PowerCut
            return step(*arguments, **named)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for where, name in STEPS:
            patch.setattr(where, name, counted(getattr(where, name)))
        try:
            do()
        except PowerCut:
            return True
    return False


def cuts(do: Callable[[], object]) -> Iterator[int]:
    """Numbers of the steps of `do`, each after the power was cut before it."""
    for number in itertools.count(1):
        if not cut_at(number, do):
            assert number > 3, "no steps were counted"
            return
        yield number


def test_enrolment_that_was_cut_is_repeated_with_the_same_key(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    def enrol() -> None:
        if identity.load(tmp_path) is None:
            enrolled(coordinator, tmp_path)

    for number in cuts(enrol):
        found = identity.load(tmp_path)
        assert found is None or found.url == coordinator.url, number
    assert identity.load(tmp_path) is not None
    assert len(coordinator.devices) == 1


def test_a_renewal_that_was_cut_leaves_the_old_identity_or_the_new(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    before = enrolled(coordinator, tmp_path)

    def renew() -> None:
        current = identity.load(tmp_path)
        assert current is not None
        identity.renew(tmp_path, current, expired=False)

    for number in cuts(renew):
        found = identity.load(tmp_path)
        assert found is not None and found.device == before.device, number
        assert found.credentials.key.exists() and found.credentials.certificate.exists()
    after = identity.load(tmp_path)
    assert after is not None and after.fingerprint != before.fingerprint
    assert [path.name for path in (tmp_path / "identities").iterdir()] == [after.folder.name]


def test_a_device_that_left_comes_back_as_another_wherever_leaving_was_cut(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        before = enrolled(coordinator, folder)
        was_cut = cut_at(number, lambda folder=folder: identity.wipe(folder))  # type: ignore[misc]
        if identity.load(folder) is None:
            assert enrolled(coordinator, folder).device != before.device, number
        if not was_cut:
            return


def test_a_damaged_identity_is_reported(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    who = enrolled(coordinator, tmp_path)
    who.credentials.certificate.write_text("cut")
    with pytest.raises(UserError, match="`fedloop-edge leave` removes it"):
        identity.load(tmp_path)
