"""What people send to be published: taken whole, or refused with a code while devices go on seeing the old state."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey
from tuf.api.metadata import Metadata, Root, TargetFile, Targets

from coordinator.accounts.admin_token import read_admin_token
from coordinator.errors import Refusal
from coordinator.operator import signed_documents
from coordinator.releases import roles
from coordinator.releases.roles import ReleaseName
from coordinator.runs.service import RunService
from coordinator.server.app import operator_app
from coordinator.server.metrics import Metrics
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from tests.support.fake_devices import answering
from tests.support.services import services_in
from tests.support.signed_releases import SignedReleases, release_folder
from tests.support.tuf_client import client

NEW = ReleaseName("cnn", 2)


class World:
    """A repository with `cnn:1`, and `cnn:2` about to be published."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.releases = SignedReleases(folder / "releases")
        self.releases.publish(release_folder(folder / "one"))
        self.new = release_folder(folder / "two", version=2, content=b"second")
        self.targets = signed_documents.next_targets(self.releases.targets, datetime.now(UTC))
        signed_documents.add_release(self.targets, self.new)
        self.files = {NEW.manifest: self.new / MANIFEST_NAME, NEW.file: self.new / MODEL_NAME}
        self.roots: list[bytes] = []

    def publish(self) -> int:
        signed = self.releases.signed_targets(self.targets)
        return self.releases.repository.publish(signed, self.files, self.roots)

    def state(self) -> dict[str, bytes]:
        """Every file that devices can see."""
        paths = [*self.served("metadata"), *self.served("targets")]
        return {str(path): path.read_bytes() for path in paths}

    def served(self, kind: str) -> list[Path]:
        return [path for path in (self.folder / "releases" / kind).rglob("*") if path.is_file()]

    def seen(self, path: str) -> bytes | None:
        """What a new device gets of a target."""
        updater = client(self.folder / "device", self.folder / "releases", self.releases.repository.root(1))
        info = updater.get_targetinfo(path)
        return None if info is None else Path(updater.download_target(info)).read_bytes()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def wrong_version(world: World) -> None:
    world.targets.version += 1


def same_version(world: World) -> None:
    world.targets.version -= 1


def wrong_signature(world: World) -> None:
    world.releases.signers["targets"] = CryptoSigner.generate_ed25519()


def online_signature(world: World) -> None:
    world.releases.signers["targets"] = CryptoSigner.generate_ed25519()
    world.roots = [world.releases.signed_root(2).to_bytes()]  # names this key, signed by the root keys …
    signed = Metadata[Root].from_bytes(world.roots[0])
    del signed.signatures[world.releases.signers["root-2"].public_key.keyid]  # … but by one alone
    world.roots = [signed.to_bytes()]


def expired(world: World) -> None:
    world.targets.expires = datetime.now(UTC) - timedelta(days=1)


def missing_file(world: World) -> None:
    del world.files[NEW.file]


def extra_file(world: World) -> None:
    world.files["cnn/3/model.tflite"] = world.new / MODEL_NAME


def extra_outside(world: World) -> None:
    world.files["../../keys/timestamp.pem"] = world.new / MODEL_NAME


def wrong_bytes(world: World) -> None:
    (world.new / MODEL_NAME).write_bytes(b"secoNd")


def too_long(world: World) -> None:
    (world.new / MODEL_NAME).write_bytes(b"second" * 1000)


def traversal(world: World) -> None:
    add(world, "../../evil/1/model.tflite")


def absolute(world: World) -> None:
    add(world, "/etc/1/model.tflite")


def other_name(world: World) -> None:
    add(world, "cnn/2/pwn.sh")


def into_rollouts(world: World) -> None:
    add(world, "rollouts/cnn.json")


def half_a_release(world: World) -> None:
    del world.targets.targets[NEW.manifest]


def traversal_in_the_hash(world: World) -> None:
    world.targets.targets[NEW.file].hashes["sha256"] = "../../../keys/x"


def huge(world: World) -> None:
    world.targets.targets[NEW.file].length = 2**40


def huge_manifest(world: World) -> None:
    world.targets.targets[NEW.manifest].length = 10**8


def of_another_model(world: World) -> None:
    manifest = json.loads((world.new / MANIFEST_NAME).read_text())
    exchange_manifest(world, json.dumps(manifest | {"model": "other"}).encode())


def manifest_is_nonsense(world: World) -> None:
    exchange_manifest(world, b"[]")


def changed_release(world: World) -> None:
    path = "cnn/1/model.tflite"
    world.targets.targets[path] = TargetFile.from_data(path, b"other", ["sha256"])


def delegates_more(world: World) -> None:
    assert world.targets.delegations is not None
    (role,) = (world.targets.delegations.roles or {}).values()
    role.paths = ["*/*"]


def delegates_to_a_stranger(world: World) -> None:
    signed_documents.delegate_rollouts(world.targets, CryptoSigner.generate_ed25519().public_key)


def root_with_other_online_keys(world: World) -> None:
    root = world.releases.signed_root(2).signed
    for role in (roles.SNAPSHOT, roles.TIMESTAMP):
        root.revoke_key(root.roles[role].keyids[0], role)
        root.add_key(CryptoSigner.generate_ed25519().public_key, role)
    sign_root(world, root)


def root_with_one_signature(world: World) -> None:
    root = world.releases.signed_root(2).signed
    root.roles["root"].threshold = 1
    sign_root(world, root)


def root_with_one_key_under_two_ids(world: World) -> None:
    mine = world.releases.signers["root-1"]
    root = world.releases.signed_root(2).signed
    root.revoke_key(world.releases.signers["root-2"].public_key.keyid, "root")
    twin = SSlibKey("2" * 64, mine.public_key.keytype, mine.public_key.scheme, mine.public_key.keyval)
    root.add_key(twin, "root")
    sign_root(world, root)
    signed = Metadata[Root].from_bytes(world.roots[0])
    signed.signatures[twin.keyid] = Signature(twin.keyid, signed.signatures[mine.public_key.keyid].signature)
    world.roots = [signed.to_bytes()]


def root_that_skips_a_version(world: World) -> None:
    world.roots = [world.releases.signed_root(3).to_bytes()]


def root_of_strangers(world: World) -> None:
    mine = dict(world.releases.signers)
    world.releases.signers |= {name: CryptoSigner.generate_ed25519() for name in ("root-1", "root-2")}
    world.roots = [world.releases.signed_root(2).to_bytes()]
    world.releases.signers = mine


def root_is_nonsense(world: World) -> None:
    world.roots = [b'{"signed": {"_type": "root"}}']


def deep_root(world: World) -> None:
    world.roots = [b"[" * 200_000]


def huge_root(world: World) -> None:
    world.roots = [b" " * 600_000]


def add(world: World, path: str) -> None:
    world.targets.targets[path] = TargetFile.from_data(path, b"second", ["sha256"])
    world.files[path] = world.new / MODEL_NAME


def exchange_manifest(world: World, text: bytes) -> None:
    (world.new / MANIFEST_NAME).write_bytes(text)
    world.targets.targets[NEW.manifest] = TargetFile.from_data(NEW.manifest, text, ["sha256"])


def sign_root(world: World, root: Root) -> None:
    signed = Metadata(root)
    for name in ("root-1", "root-2"):
        signed.sign(world.releases.signers[name], append=True)
    world.roots = [signed.to_bytes()]


HOSTILE: list[tuple[Callable[[World], None], int, str]] = [
    (wrong_version, 422, "wrong_version"),
    (same_version, 422, "wrong_version"),
    (wrong_signature, 422, "bad_signature"),
    (online_signature, 422, "bad_signature"),
    (expired, 422, "expired"),
    (missing_file, 422, "missing_file"),
    (extra_file, 422, "extra_file"),
    (extra_outside, 422, "extra_file"),
    (wrong_bytes, 422, "wrong_bytes"),
    (too_long, 422, "wrong_bytes"),
    (traversal, 422, "bad_path"),
    (absolute, 422, "bad_path"),
    (other_name, 422, "bad_path"),
    (into_rollouts, 422, "bad_path"),
    (half_a_release, 422, "incomplete_release"),
    (traversal_in_the_hash, 422, "malformed"),
    (huge, 413, "oversized"),
    (huge_manifest, 413, "oversized"),
    (of_another_model, 422, "wrong_manifest"),
    (manifest_is_nonsense, 422, "wrong_manifest"),
    (changed_release, 422, "changed_release"),
    (delegates_more, 422, "bad_delegation"),
    (delegates_to_a_stranger, 422, "other_online_keys"),
    (root_with_other_online_keys, 422, "other_online_keys"),
    (root_with_one_signature, 422, "weak_root"),
    (root_with_one_key_under_two_ids, 422, "weak_root"),
    (root_that_skips_a_version, 422, "wrong_version"),
    (root_of_strangers, 422, "bad_signature"),
    (root_is_nonsense, 422, "malformed"),
    (deep_root, 422, "malformed"),
    (huge_root, 413, "oversized"),
]


@pytest.mark.parametrize(("spoil", "status", "code"), HOSTILE, ids=lambda each: getattr(each, "__name__", ""))
def test_a_hostile_publish_is_refused_and_changes_nothing(
    world: World, spoil: Callable[[World], None], status: int, code: str
) -> None:
    before = world.state()
    spoil(world)
    with pytest.raises(Refusal) as refused:
        world.publish()
    assert (refused.value.status, refused.value.code) == (status, code), str(refused.value)
    assert world.state() == before
    assert world.seen("cnn/1/model.tflite") == b"weights"


def test_a_valid_release_is_published_and_may_be_published_again(world: World) -> None:
    assert world.publish() == 3
    assert world.publish() == 3
    assert world.seen(NEW.file) == b"second"


def test_a_withdrawn_release_is_gone_and_its_number_is_free_for_nobody_online(world: World) -> None:
    world.releases.withdraw("cnn", 1)
    assert world.seen("cnn/1/model.tflite") is None
    assert not world.releases.repository.releases()
    with pytest.raises(Refusal) as refused:
        world.releases.publish(release_folder(world.folder / "other", content=b"other"))
    assert refused.value.code == "changed_release"
    world.releases.targets.version -= 1
    world.releases.targets.targets.clear()
    world.releases.publish(world.folder / "one")
    assert world.seen("cnn/1/model.tflite") == b"weights"


def test_a_lost_targets_key_is_replaced_by_the_root_keys(world: World) -> None:
    assert world.seen("cnn/1/model.tflite") == b"weights"
    world.releases.rotate(lost_targets_key=True)
    assert world.seen("cnn/1/model.tflite") == b"weights"


@pytest.mark.slow
def test_rollouts_name_releases_that_exist(world: World) -> None:
    entry = {
        "rollout": "r",
        "version": 1,
        "action": "install",
        "force": False,
        "devices": None,
        "salt": "",
        "permille": 0,
    }
    repository = world.releases.repository
    for version, model, code in ((2, "cnn", "unknown_release"), (1, "other", "malformed")):
        with pytest.raises(Refusal) as refused:
            repository.set_rollouts("cnn", {"model": model, "rollouts": [entry | {"version": version}]})
        assert refused.value.code == code
    repository.set_rollouts("cnn", {"model": "cnn", "rollouts": [entry]})
    signed = repository.stored.rollouts().signed.targets["rollouts/cnn.json"]
    document = json.loads(repository.stored.path_of(signed).read_bytes())
    assert document == {"model": "cnn", "rollouts": [entry]}
    many = [f"{number:036}" for number in range(100_000)]
    repository.set_rollouts("cnn", {"model": "cnn", "rollouts": [entry | {"devices": many}]})
    more = {"model": "cnn", "rollouts": [entry | {"devices": many}, entry | {"devices": many[:5000]}]}
    with pytest.raises(Refusal) as refused:
        repository.set_rollouts("cnn", more)
    assert refused.value.code == "oversized"


# -- over the operator API --------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path: Path) -> Iterator[TestClient]:
    home = tmp_path / "home"
    with services_in(home) as services:
        app = operator_app(
            services, RunService(services, answering), Metrics(services.database, services.signals)
        )
        headers = {"Authorization": f"Bearer {read_admin_token(home)}"}
        yield TestClient(app, base_url="http://127.0.0.1", headers=headers, raise_server_exceptions=False)


def upload(api: TestClient, content: bytes, size: int = 1000) -> str:
    sha256 = hashlib.sha256(content).hexdigest()
    for at in range(0, len(content), size):
        path = f"/api/v1/releases/files/{sha256}"
        assert api.put(path, params={"offset": at}, content=content[at : at + size]).status_code == 200
    return sha256


def test_a_repository_begins_and_grows_over_the_api(api: TestClient, tmp_path: Path) -> None:
    assert api.get("/api/v1/releases/metadata").json()["error"]["code"] == "no_repository"
    elsewhere = SignedReleases(tmp_path / "elsewhere")
    online = api.get("/api/v1/releases/online-keys").json()
    assert online.keys() == set(roles.ONLINE_ROLES)
    keys = {name: signer.public_key for name, signer in elsewhere.signers.items()}
    found = {
        role: CryptoSigner.generate_ed25519().public_key.from_dict(key.pop("keyid"), key)
        for role, key in online.items()
    }
    root = Metadata(
        signed_documents.make_root(
            keys | {r: found[r] for r in ("snapshot", "timestamp")}, 1, datetime.now(UTC)
        )
    )
    for name in ("root-1", "root-2"):
        root.sign(elsewhere.signers[name], append=True)
    targets = signed_documents.first_targets(found["rollouts"], datetime.now(UTC))
    folder = release_folder(tmp_path / "one", content=b"x" * 5000)
    signed_documents.add_release(targets, folder)
    body = {
        "targets": upload(api, elsewhere.signed_targets(targets)),
        "roots": [upload(api, root.to_bytes())],
        "files": {
            "cnn/1/manifest.json": upload(api, (folder / MANIFEST_NAME).read_bytes()),
            "cnn/1/model.tflite": upload(api, b"x" * 5000),
        },
    }
    assert api.post("/api/v1/releases", json=body).json() == {"version": 1}
    (release,) = api.get("/api/v1/releases").json()
    assert (release["model"], release["version"], release["model_bytes"]) == ("cnn", 1, 5000)
    status = api.get("/api/v1/releases/status").json()
    assert [role["is_valid"] for role in status["roles"]] == [True] * 5
    assert status["warnings"] == []
    assert not list((tmp_path / "home/releases/incoming").iterdir())
    metadata = api.get("/api/v1/releases/metadata").json()
    assert Metadata[Targets].from_bytes(metadata["targets"].encode()).signed.version == 1


def test_uploads_go_on_where_they_stopped(api: TestClient) -> None:
    path = f"/api/v1/releases/files/{'0' * 64}"
    assert api.put(path, params={"offset": 0}, content=b"abc").json() == {"offset": 3}
    assert api.put(path, params={"offset": 0}, content=b"abc").json() == {"offset": 3}
    assert api.put(path, params={"offset": 9}, content=b"abc").json() == {"offset": 3}
    assert api.get(path).json() == {"offset": 3}


def test_a_publish_leaves_other_peoples_uploads_alone(api: TestClient, tmp_path: Path) -> None:
    other, abandoned = upload(api, b"of somebody else"), upload(api, b"of last week")
    last_week = time.time() - 7 * 86_400
    os.utime(tmp_path / "home/releases/incoming" / abandoned, (last_week, last_week))
    assert api.post("/api/v1/releases", json={"targets": upload(api, b"nonsense")}).status_code == 422
    assert [path.name for path in (tmp_path / "home/releases/incoming").iterdir()] == [other]


def test_bad_requests_are_refused_with_a_code(api: TestClient) -> None:
    def code(response: object) -> tuple[int, str]:
        return response.status_code, response.json()["error"]["code"]  # type: ignore[attr-defined]

    somewhere = "/api/v1/releases/files/..%2F..%2Fadmin.token"
    assert code(api.put(somewhere, params={"offset": 0}, content=b"x")) == (404, "not_found")
    assert code(api.put(f"/api/v1/releases/files/{'z' * 64}", params={"offset": 0}, content=b"x")) == (
        404,
        "not_found",
    )
    big = api.put(f"/api/v1/releases/files/{'0' * 64}", params={"offset": 0}, content=b"x" * (5 * 2**20))
    assert code(big) == (413, "oversized")
    assert code(api.post("/api/v1/releases", json={"targets": "1" * 64})) == (422, "missing_file")
    assert code(api.post("/api/v1/releases", json={"targets": "../x"})) == (404, "not_found")
    assert code(api.post("/api/v1/releases", json={})) == (422, "malformed")
    sent = upload(api, b"nonsense")
    assert code(api.post("/api/v1/releases", json={"targets": sent})) == (422, "no_root")
