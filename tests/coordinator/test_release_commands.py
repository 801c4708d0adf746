"""`fedloop release` from the command line: keys, offline signing, publishing to a coordinator, and refusals."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from tuf.api.metadata import Metadata
from typer.testing import CliRunner, Result

from coordinator.commands.release import app
from coordinator.errors import UserError
from coordinator.operator.staging import Staging
from edge_client.wire import inference
from tests.support.cli import FEDLOOP, started
from tests.support.require import require
from tests.support.signed_releases import SignedReleases, release_folder
from tests.support.tuf_client import client

PASSPHRASE = "correct horse"


def release(*arguments: str | Path, passphrase: str | None = PASSPHRASE) -> Result:
    """Runs a command that must succeed."""
    done = invoke(*arguments, passphrase=passphrase)
    assert done.exception is None, (done.output, done.exception)
    return done


def refused(*arguments: str | Path, passphrase: str | None = PASSPHRASE) -> str:
    """The message of a refused command."""
    done = invoke(*arguments, passphrase=passphrase)
    assert isinstance(done.exception, UserError), (done.output, done.exception)
    return str(done.exception)


def invoke(*arguments: str | Path, passphrase: str | None) -> Result:
    environment = {"FEDLOOP_RELEASE_PASSPHRASE": passphrase}
    return CliRunner().invoke(app, [str(each) for each in arguments], env=environment)


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """Keys, the keys of a coordinator, and a staging folder with a first release in it, all unsigned."""
    release("keygen", tmp_path / "keys")
    online = SignedReleases(tmp_path / "coordinator").repository.online_keys(rotate=True)
    document = {role: {"keyid": key.keyid, **key.to_dict()} for role, key in online.items()}
    (tmp_path / "online.json").write_text(json.dumps(document))
    release(
        "init",
        "--keys",
        tmp_path / "keys",
        "--online",
        tmp_path / "online.json",
        "--staging",
        tmp_path / "stick",
    )
    release("add", release_folder(tmp_path / "one"), "--staging", tmp_path / "stick")
    return tmp_path


def test_keys_are_encrypted_closed_and_never_overwritten(tmp_path: Path) -> None:
    release("keygen", tmp_path / "keys")
    for name in ("root-1", "root-2", "targets"):
        path = tmp_path / "keys" / f"{name}.pem"
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"ENCRYPTED" in path.read_bytes()
        load_pem_private_key(path.read_bytes(), PASSPHRASE.encode())
    before = (tmp_path / "keys/root-1.pem").read_bytes()
    assert "never overwritten" in refused("keygen", tmp_path / "keys")
    assert (tmp_path / "keys/root-1.pem").read_bytes() == before
    theirs = tmp_path / "of-a-colleague"
    theirs.mkdir()
    shutil.copy(tmp_path / "keys/root-1.pub", theirs)
    assert "root-1.pub exists" in refused("keygen", theirs)
    assert (theirs / "root-1.pub").read_bytes() == (tmp_path / "keys/root-1.pub").read_bytes()


def test_an_empty_passphrase_is_refused(tmp_path: Path) -> None:
    assert "--no-passphrase" in refused("keygen", tmp_path / "keys", passphrase="")
    assert "FEDLOOP_RELEASE_PASSPHRASE" in refused("keygen", tmp_path / "keys", passphrase=None)
    assert not (tmp_path / "keys").exists()
    release("keygen", tmp_path / "keys", "--no-passphrase", "--key", "root-2", passphrase=None)
    assert [path.name for path in sorted((tmp_path / "keys").iterdir())] == ["root-2.pem", "root-2.pub"]


@pytest.mark.slow
def test_signing_needs_no_network(staged: Path) -> None:
    unshare = shutil.which("unshare")
    command = ["unshare", "--map-root-user", "--net"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        require("namespaces", "unshare --net is not possible here")
    release_folder(staged / "two", version=2)
    environment = {**os.environ, "FEDLOOP_RELEASE_PASSPHRASE": PASSPHRASE}
    for arguments in (
        ["add", staged / "two", "--staging", staged / "stick"],
        ["sign", "--keys", staged / "keys", "--staging", staged / "stick"],
    ):
        done = subprocess.run(
            [*command, FEDLOOP, "release", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "adds cnn:2" in done.stdout
    assert "all signatures are there" in done.stdout


def test_signers_see_how_many_real_rows_a_manifest_carries(staged: Path) -> None:
    folder = release_folder(staged / "two", version=2)
    manifest = inference.from_json((folder / "manifest.json").read_bytes())
    golden = replace(manifest.golden, real_x=((0.5,) * 64,) * 3, real_y=(1, 2, 3))
    (folder / "manifest.json").write_text(replace(manifest, golden=golden).to_json())
    release("add", folder, "--staging", staged / "stick")

    said = release("sign", "--keys", staged / "keys", "--staging", staged / "stick").output

    of_one, of_two = said.partition("adds cnn:1")[2].split("adds cnn:2")
    assert "no rows of real data" in of_one
    assert "PUBLISHES 3 rows of real data" in of_two


@pytest.mark.parametrize("name", ["arrays", "export", "rows.npy"])
def test_a_release_folder_with_other_files_is_not_staged(staged: Path, name: str) -> None:
    folder = release_folder(staged / "two", version=2)
    (folder / name).mkdir()

    said = refused("add", folder, "--staging", staged / "stick")

    assert f"holds {name}, not a file of a release" in said and "export again" in said


def test_each_key_signs_its_documents_and_missing_signatures_are_listed(staged: Path) -> None:
    one = staged / "first"
    one.mkdir()
    for kind in ("pem", "pub"):
        shutil.move(staged / f"keys/root-1.{kind}", one)
    said = release("sign", "--keys", one, "--staging", staged / "stick").output
    assert "for the first time" in said and "root by root-1" in said
    assert "1 signature made" in said
    assert "still to be signed: root 1 by root-2" in said
    assert "still to be signed: targets 1 by targets" in said
    assert "root-1" not in said.split("1 signature made")[1]
    assert (
        "all signatures are there"
        in release("sign", "--keys", staged / "keys", "--staging", staged / "stick").output
    )


def test_a_change_after_signing_needs_new_signatures(staged: Path) -> None:
    release("sign", "--keys", staged / "keys", "--staging", staged / "stick")
    said = release("add", release_folder(staged / "two", version=2), "--staging", staged / "stick").output
    assert "still to be signed: targets 1" in said


def test_a_wrong_passphrase_is_refused(staged: Path) -> None:
    arguments = "sign", "--keys", staged / "keys", "--staging", staged / "stick"
    assert "wrong passphrase" in refused(*arguments, passphrase="guess")


def test_a_file_changed_on_the_stick_is_not_signed(staged: Path) -> None:
    (staged / "stick/files/cnn/1/model.tflite").write_bytes(b"other")
    assert "not the file" in refused("sign", "--keys", staged / "keys", "--staging", staged / "stick")


def test_keys_sign_for_one_repository(staged: Path) -> None:
    """A carrier of the stick replaces the root by one that trusts our targets key and theirs."""
    release("sign", "--keys", staged / "keys", "--staging", staged / "stick")
    release("keygen", staged / "theirs", "--key", "root-1", "--key", "root-2")
    for name in ("root-1.pub", "root-2.pub"):
        (staged / "keys" / name).rename(staged / f"our-{name}")
    both = "--keys", staged / "keys", "--keys", staged / "theirs"
    release("init", *both, "--online", staged / "online.json", "--staging", staged / "evil")
    arguments = "sign", "--keys", staged / "keys", "--staging", staged / "evil"
    assert "does not follow from" in refused(*arguments)


def other_bytes_under_a_name(stick: Path) -> None:
    edit(
        stick / "targets.json",
        lambda it: it["targets"]["cnn/1/model.tflite"]["hashes"].update(sha256="a" * 64),
    )


def a_delegation_of_theirs(stick: Path) -> None:
    def add(targets: dict[str, Any]) -> None:
        theirs = targets["delegations"]["roles"][0] | {"name": "theirs", "paths": ["*/*/*"]}
        targets["delegations"]["roles"].append(theirs)

    edit(stick / "targets.json", add)


def no_delegation(stick: Path) -> None:
    edit(stick / "targets.json", lambda it: it.pop("delegations"))


def one_signature_for_root(stick: Path) -> None:
    edit(stick / "root.json", lambda it: it["roles"]["root"].update(threshold=1))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document["signed"])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "forge", [other_bytes_under_a_name, a_delegation_of_theirs, no_delegation, one_signature_for_root]
)
def test_documents_that_a_carrier_changed_are_not_signed(
    tmp_path: Path, forge: Callable[[Path], None]
) -> None:
    """None of these changes is listed, and devices would trust the signatures."""
    releases, keys, stick = *signed_with_key_files(tmp_path), tmp_path / "stick"
    release("extend", "--root", "--staging", stick)
    forge(stick)
    assert "must not be signed" in refused("sign", "--keys", keys, "--staging", stick)
    assert "must not be signed" in refused("staged", "--staging", stick)
    assert all(not Metadata.from_file(str(stick / f"{name}.json")).signatures for name in ("root", "targets"))
    assert releases.repository.releases()


def test_another_key_under_an_old_id_is_shown(tmp_path: Path) -> None:
    signed_with_key_files(tmp_path)
    stick = tmp_path / "stick"
    release("extend", "--root", "--staging", stick)

    def exchange(root: dict[str, Any]) -> None:
        root["keys"][root["roles"]["targets"]["keyids"][0]]["keyval"]["public"] = "a" * 64

    def exchange_rollouts(targets: dict[str, Any]) -> None:
        (key,) = targets["delegations"]["keys"].values()
        key["keyval"]["public"] = "b" * 64

    edit(stick / "root.json", exchange)
    edit(stick / "targets.json", exchange_rollouts)
    said = release("staged", "--staging", stick).output
    assert "targets is signed by" in said and "targets is no longer signed by" in said
    assert "rollouts are signed by" in said


def test_documents_of_an_interrupted_publish_are_not_staged_again(tmp_path: Path) -> None:
    """The documents were published, and the folder records only a part of that."""
    signed_with_key_files(tmp_path)
    stick = tmp_path / "stick"
    release("extend", "--root", "--staging", stick)
    release("sign", "--keys", tmp_path / "keys", "--staging", stick)
    for name, kept in (("root", "2.root"), ("targets", "targets")):
        shutil.copy(stick / f"{name}.json", stick / f"published/{kept}.json")
    assert "root 3," in release("extend", "--root", "--staging", stick).output
    assert "targets 4," in release("staged", "--staging", stick).output


def signed_with_key_files(folder: Path) -> tuple[SignedReleases, Path]:
    """A published repository with a release, its keys as files, and its metadata fetched into `stick`."""
    releases, keys = SignedReleases(folder / "coordinator"), folder / "keys"
    releases.publish(release_folder(folder / "one"))
    keys.mkdir()
    for name, signer in releases.signers.items():
        (keys / f"{name}.pem").write_bytes(signer.private_bytes)
    Staging(folder / "stick").update(releases.repository.roots(), releases.repository.targets())
    return releases, keys


def test_keys_in_use_change_nothing(staged: Path) -> None:
    arguments = "rotate-root", "--keys", staged / "keys", "--staging", staged / "stick"
    assert "in use there already" in refused(*arguments)


def test_a_damaged_document_says_what_to_do(staged: Path) -> None:
    (staged / "stick/targets.json").write_text("{")
    assert "remove it, and stage the change again" in refused("staged", "--staging", staged / "stick")


def test_one_key_under_two_names_is_one_signature(staged: Path) -> None:
    shutil.copy(staged / "keys/root-1.pub", staged / "keys/root-2.pub")
    arguments = (
        "init",
        "--keys",
        staged / "keys",
        "--online",
        staged / "online.json",
        "--staging",
        staged / "new",
    )
    assert "two names" in refused(*arguments)


def test_forged_metadata_of_a_coordinator_is_not_copied(tmp_path: Path) -> None:
    """Other roots than the known ones, targets without the root's signatures, and older targets are refused."""
    ours, theirs = SignedReleases(tmp_path / "ours"), SignedReleases(tmp_path / "theirs")
    staging, repository = Staging(tmp_path / "stick"), ours.repository
    old = repository.targets()
    ours.publish(release_folder(tmp_path / "one"))
    assert staging.update(repository.roots(), repository.targets()) == []
    for roots, targets, words in (
        (theirs.repository.roots(), theirs.repository.targets(), "does not follow"),
        (repository.roots(), theirs.signed_targets(ours.targets), "lack the signatures"),
        (repository.roots(), old, "older targets"),
        ([b"{}"], old, "nothing was copied"),
    ):
        with pytest.raises(UserError, match=words):
            staging.update(roots, targets)
    published = staging.published_targets()
    assert published is not None
    assert published.to_bytes() == repository.targets()


def test_invalid_releases_are_refused(staged: Path) -> None:
    stick = staged / "stick"
    assert "model.tflite" in refused("add", staged / "nowhere", "--staging", stick)
    spoilt = release_folder(staged / "spoilt", version=2)
    (spoilt / "model.tflite").write_bytes(b"other")
    assert "another file" in refused("add", spoilt, "--staging", stick)
    again = release_folder(staged / "again", content=b"other")
    assert "new version" in refused("add", again, "--staging", stick)
    named = release_folder(staged / "named", model="../x", version=1)
    assert "not the name of a release" in refused("add", named, "--staging", stick)
    assert "such as cnn:3" in refused("withdraw", "cnn", "--staging", stick)
    assert "no such release" in refused("withdraw", "cnn:7", "--staging", stick)
    assert "fedloop release init" in refused(
        "add", release_folder(staged / "x"), "--staging", staged / "empty"
    )


@contextmanager
def serving(home: Path) -> Iterator[dict[str, Any]]:
    """A coordinator; its addresses."""
    with started("serve", "--home", home, "--operator", "127.0.0.1:0", "--device", "127.0.0.1:0") as process:
        place = home / "serve.json"
        assert process.reaches(place.exists), process.errors()
        yield json.loads(place.read_text())


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[dict[str, Any]]:
    with serving(tmp_path / "home") as place:
        yield place


@pytest.mark.slow
def test_the_guide_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/releases.md").read_text("utf-8")
    lines = "".join(re.findall(r"```sh\n(.*?)```", page, re.DOTALL)).splitlines()
    assert len(lines) > 15
    release_folder(tmp_path / "export")
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "home") as place:
        monkeypatch.setenv("FEDLOOP_HOME", place["home"])
        monkeypatch.setenv("FEDLOOP_COORDINATOR", place["operator"])
        for line in lines:
            command, _, target = line.partition(" > ")
            words = shlex.split(command)
            assert words[:2] == ["fedloop", "release"]
            done = release(*words[2:])
            if target:
                Path(target).write_text(done.stdout)
        found = json.loads(release("status", "--json").stdout)
    assert {role["role"]: role["version"] for role in found["roles"]}["root"] == 3
    assert [role["is_valid"] for role in found["roles"]] == [True] * 5
    assert [key["name"] for key in found["roles"][0]["keys"]] == ["root-1", "root-2"]
    assert found["needs"] == []
    assert [each["model"] for each in found["releases"]] == ["cnn"]


@pytest.mark.slow
def test_the_ceremony_from_keys_to_a_rotation(
    coordinator: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(coordinator["home"])
    monkeypatch.setenv("FEDLOOP_HOME", str(home))
    monkeypatch.setenv("FEDLOOP_COORDINATOR", coordinator["operator"])
    keys, stick, online = tmp_path / "keys", tmp_path / "stick", tmp_path / "online.json"
    on_stick = "--staging", stick
    assert "no signed releases yet" in release("status").output
    release("keygen", keys)
    online.write_text(release("online-keys").stdout)
    release("init", "--keys", keys, "--online", online, *on_stick)
    assert "signatures are missing" in refused("publish", *on_stick)
    release("sign", "--keys", keys, *on_stick)
    assert "published targets 1" in release("publish", *on_stick).output
    assert "nothing is staged" in refused("publish", *on_stick)

    release("add", release_folder(tmp_path / "one", content=bytes(5 * 2**20)), *on_stick)
    release("sign", "--keys", keys, *on_stick)
    release("publish", *on_stick)
    assert "cnn:1" in release("list").output

    elsewhere = "--staging", tmp_path / "other-stick"
    release("fetch", *elsewhere)
    release("withdraw", "cnn:1", *elsewhere)
    release("add", release_folder(tmp_path / "two", version=2), *elsewhere)
    assert "withdraws cnn:1" in release("sign", "--keys", keys, *elsewhere).output
    release("publish", *elsewhere)
    assert [each["version"] for each in json.loads(release("list", "--json").stdout)] == [2]
    release("extend", *on_stick)  # the first stick does not know of it
    release("sign", "--keys", keys, *on_stick)
    assert "first run `fedloop release fetch`" in refused("publish", *on_stick)
    assert "dropped" in release("fetch", *on_stick).output
    assert "nothing is staged" in refused("publish", *on_stick)

    device, root = tmp_path / "device", (home / "releases/metadata/1.root.json").read_bytes()
    assert client(device, home / "releases", root).get_targetinfo("cnn/2/model.tflite") is not None
    new = tmp_path / "new-keys"
    release("keygen", new)
    release("rotate-root", "--keys", new, *elsewhere)
    online.write_text(release("online-keys", "--rotate").stdout)
    release("rotate-online", "--online", online, *elsewhere)
    assert "still to be signed" in release("sign", "--keys", keys, *elsewhere).output
    release("sign", "--keys", new, *elsewhere)
    release("publish", *elsewhere)
    found = json.loads(release("status", "--json").stdout)
    assert [role["is_valid"] for role in found["roles"]] == [True] * 5
    assert client(device, home / "releases", root).get_targetinfo("cnn/2/model.tflite") is not None
