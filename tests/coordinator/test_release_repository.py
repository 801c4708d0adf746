"""The repository of releases on disk: what a TUF client reads of it, how it stays fresh, and what is swept away."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Timestamp

from coordinator.errors import Refusal
from coordinator.releases.renewal import needs, warnings
from coordinator.releases.repository import Repository
from coordinator.releases.roles import LIFETIMES
from coordinator.releases.stored import KEPT_SNAPSHOTS
from edge_client.wire import blocks
from tests.support.signed_releases import SignedReleases, release_folder
from tests.support.tuf_client import client


class Clock:
    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_days(self, days: float) -> datetime:
        self.now += timedelta(days=days)
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def releases(tmp_path: Path, clock: Clock) -> SignedReleases:
    made = SignedReleases(tmp_path / "releases", clock)
    made.publish(release_folder(tmp_path / "one"))
    return made


def versions(releases: SignedReleases) -> dict[str, int]:
    return {state.role: state.version for state in releases.repository.state()}


def test_a_client_gets_what_was_published(releases: SignedReleases, tmp_path: Path) -> None:
    updater = client(tmp_path / "device", tmp_path / "releases", releases.repository.root(1))
    info = updater.get_targetinfo("cnn/1/model.tflite")
    assert info is not None
    assert Path(updater.download_target(info)).read_bytes() == b"weights"
    assert blocks.read(info.custom, info.length) is not None


def test_the_predictions_of_a_release_are_read_by_its_manifest(releases: SignedReleases) -> None:
    assert releases.repository.task_of("cnn", 1) == "classification"
    assert releases.repository.task_of("cnn", 2) is None


def test_rollouts_are_read_by_a_client(releases: SignedReleases, tmp_path: Path) -> None:
    document = {"model": "cnn", "rollouts": [{"rollout": "r1", "version": 1, "action": "install"}]}
    releases.repository.set_rollouts("cnn", document)
    updater = client(tmp_path / "device", tmp_path / "releases", releases.repository.root(1))
    info = updater.get_targetinfo("rollouts/cnn.json")
    assert info is not None
    assert b'"r1"' in Path(updater.download_target(info)).read_bytes()


def test_there_is_nothing_before_the_first_publish(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "new", Clock())
    assert not repository.exists
    assert (repository.state(), repository.releases(), repository.renew(datetime.now(UTC))) == ([], (), [])
    for ask in (repository.root, repository.roots, repository.targets):
        with pytest.raises(Refusal) as refused:
            ask()
        assert refused.value.code == "no_repository"


def test_online_roles_are_renewed_at_half_of_their_life_and_only_they(
    releases: SignedReleases, clock: Clock
) -> None:
    before = versions(releases)
    assert releases.repository.renew(clock.pass_days(0.4)) == []
    assert releases.repository.renew(clock.pass_days(0.2)) == ["timestamp"]
    assert releases.repository.renew(clock.pass_days(3)) == ["snapshot", "timestamp"]
    assert releases.repository.renew(clock.pass_days(12)) == ["rollouts", "snapshot", "timestamp"]
    after = versions(releases)
    assert {role: after[role] - before[role] for role in after} == {
        "root": 0,
        "targets": 0,
        "rollouts": 1,
        "snapshot": 2,
        "timestamp": 3,
    }


def test_renewed_every_six_hours_nothing_online_ever_expires(releases: SignedReleases, clock: Clock) -> None:
    for _ in range(40):
        releases.repository.renew(clock.pass_days(0.25))
        assert all(state.is_valid for state in releases.repository.state())


def test_after_a_long_silence_the_next_renewal_makes_all_valid(
    releases: SignedReleases, clock: Clock
) -> None:
    now = clock.pass_days(100)
    assert [state.is_valid for state in releases.repository.state()] == [True, True, False, False, False]
    assert releases.repository.renew(now) == ["rollouts", "snapshot", "timestamp"]
    assert all(state.is_valid for state in releases.repository.state())


def test_the_state_says_which_keys_of_each_role_have_signed(releases: SignedReleases) -> None:
    keys = {state.role: [key.has_signed for key in state.keys] for state in releases.repository.state()}
    assert (keys["root"], keys["targets"], keys["timestamp"]) == ([True, True], [True], [True])
    assert [state.threshold for state in releases.repository.state()] == [2, 1, 1, 1, 1]


def test_new_online_keys_wait_until_a_root_names_them(releases: SignedReleases) -> None:
    assert releases.repository.unnamed_online_roles() == []
    releases.repository.online_keys(rotate=True)
    assert sorted(releases.repository.unnamed_online_roles()) == ["rollouts", "snapshot", "timestamp"]


def test_a_warning_precedes_the_expiry_of_signatures(releases: SignedReleases, clock: Clock) -> None:
    assert warnings(releases.repository.state(), clock()) == []
    now = clock.pass_days(LIFETIMES["targets"].days - 20)
    releases.repository.renew(now)
    (result,) = warnings(releases.repository.state(), now)
    assert "targets" in result
    assert "sign it again before" in result
    (need,) = needs(releases.repository.state(), now)
    assert need.commands[0] == "fedloop release extend --staging stick"
    now = clock.pass_days(25)
    releases.repository.renew(now)
    (result,) = warnings(releases.repository.state(), now)
    assert "expired" in result


def test_online_metadata_without_a_signature_that_counts_is_signed_anew(
    releases: SignedReleases, clock: Clock
) -> None:
    path = Path(str(releases.repository.stored.metadata_file("timestamp.json")))
    unsigned = Metadata[Timestamp].from_bytes(path.read_bytes())
    unsigned.signatures.clear()
    path.write_bytes(unsigned.to_bytes())
    assert releases.repository.renew(clock()) == ["timestamp"]
    assert all(state.is_valid for state in releases.repository.state())


def test_long_past_states_are_swept_away_and_roots_are_kept(releases: SignedReleases, tmp_path: Path) -> None:
    for number in range(KEPT_SNAPSHOTS + 5):
        releases.repository.set_rollouts(
            "cnn",
            {"model": "cnn", "rollouts": [{"rollout": f"r{number}", "version": 1, "action": "install"}]},
        )
    metadata = tmp_path / "releases/metadata"
    assert len(list(metadata.glob("*.snapshot.json"))) == KEPT_SNAPSHOTS
    assert len(list(metadata.glob("*.rollouts.json"))) == KEPT_SNAPSHOTS
    assert len(list((tmp_path / "releases/targets/rollouts").iterdir())) == KEPT_SNAPSHOTS
    assert len(list(metadata.glob("*.targets.json"))) == 2
    assert len(list(metadata.glob("*.root.json"))) == 1


def test_the_files_of_a_withdrawn_release_go_when_no_device_may_be_reading_them(
    releases: SignedReleases, tmp_path: Path, clock: Clock
) -> None:
    releases.publish(release_folder(tmp_path / "two", version=2, content=b"second"))
    releases.withdraw("cnn", 1)
    files = tmp_path / "releases/targets/cnn"
    assert len(list(files.glob("*/*"))) == 4
    for _ in range(KEPT_SNAPSHOTS):
        releases.repository.set_rollouts("cnn", {"model": "cnn", "rollouts": []})
    releases.repository.renew(clock.pass_days(1))
    assert {path.parent.name for path in files.glob("*/*")} == {"2"}
    updater = client(tmp_path / "device", tmp_path / "releases", releases.repository.root(1))
    info = updater.get_targetinfo("cnn/2/model.tflite")
    assert info is not None and Path(updater.download_target(info)).read_bytes() == b"second"


def test_devices_still_get_the_order_to_run_nothing_once_the_only_release_is_withdrawn(
    releases: SignedReleases, tmp_path: Path
) -> None:
    nothing = {"rollout": "r", "version": 0, "action": "roll_back", "force": False, "devices": ["ada"], "salt": "", "permille": 0}  # fmt: skip
    releases.repository.set_rollouts("cnn", {"model": "cnn", "rollouts": [nothing]})
    releases.withdraw("cnn", 1)
    updater = client(tmp_path / "device", tmp_path / "releases", releases.repository.root(1))
    info = updater.get_targetinfo("rollouts/cnn.json")
    assert info is not None
    assert json.loads(Path(updater.download_target(info)).read_bytes())["rollouts"] == [nothing]


def test_online_keys_are_closed_to_others_and_waiting_ones_are_dropped_by_the_next_rotation(
    releases: SignedReleases, tmp_path: Path
) -> None:
    first = releases.repository.online_keys(rotate=True)
    assert releases.repository.online_keys() == first
    second = releases.repository.online_keys(rotate=True)
    assert releases.repository.online_keys() == second
    paths = list((tmp_path / "releases/keys").iterdir())
    assert len(paths) == 6
    names = {path.stem for path in paths}
    assert {f"{role}-{key.keyid}" for role, key in second.items()} < names
    assert not {f"{role}-{key.keyid}" for role, key in first.items()} & names
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    releases.rotate()
    assert len(list((tmp_path / "releases/keys").iterdir())) == 3
