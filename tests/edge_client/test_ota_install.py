"""The daemon's own installer against a real repository over mutual TLS: what it takes, what it refuses and why."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, TargetFile

from coordinator.context.services import utc_now
from edge_client.ota import (
    download,
    install,
    self_test,
    slots,
    transitions,
)
from edge_client.ota.errors import (
    NotSigned,
    Postponed,
    Rejected,
)
from edge_client.ota.releases import Releases
from edge_client.serving.predict import NoRelease, active_release
from edge_client.transport.failures import Unreachable
from edge_client.wire.device import ReleaseOffer
from edge_client.wire.inference import GoldenRows
from edge_client.wire.manifest import Fill, Tolerance
from edge_client.wire.rollouts import NO_MODEL
from tests.support import released
from tests.support.ota import MODEL, Clock, World, world
from tests.support.small_disk import fill, small_disk


@pytest.fixture
def ota(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made


@pytest.fixture
def served(ota: World) -> World:
    """Version 1 runs."""
    ota.publish(1)
    ota.install(ota.roll_out(1))
    ota.coordinator.served.clear()
    return ota


def refused(ota: World, version: int = 2) -> str:
    """The code with which the installer puts a version off; the old slot keeps serving."""
    offer = ota.roll_out(version) if f"rollout-{version}" not in ota.rollouts else _offer(ota, version)
    return code_of(ota, offer)


def _offer(ota: World, version: int) -> ReleaseOffer:
    return ReleaseOffer(f"rollout-{version}", MODEL, version)


def code_of(ota: World, offer: ReleaseOffer) -> str:
    with pytest.raises(Postponed) as raised:
        ota.install(offer)
    assert ota.runs() == 1
    (active, last) = transitions.reports(ota.pointer)
    assert (active.standing, active.version) == ("active", 1)
    assert (last.standing, last.version, last.code) == ("installing", offer.version, raised.value.code)
    return raised.value.code


def test_a_release_is_installed_tested_and_reported(ota: World) -> None:
    size = (ota.publish(1) / "model.tflite").stat().st_size
    words = ota.install(ota.roll_out(1), self_test.run)
    assert words == f"digits:1 runs, {size} of {size} bytes fetched"
    assert ota.runs() == 1
    (report,) = transitions.reports(ota.pointer)
    assert (report.rollout, report.standing, report.golden_accuracy) == ("rollout-1", "active", 0.9375)
    assert ota.pointer.trial_starts == 0


def test_the_next_version_goes_into_the_other_slot_and_fetches_only_what_changed(served: World) -> None:
    served.publish(2, "second")
    served.install(served.roll_out(2))
    assert served.runs() == 2
    before = served.pointer.spare
    assert before is not None and (before.version, before.rollout, before.proved) == (1, "rollout-1", True)
    assert served.bytes_served() == 6 * 1024, "the head has 5160 bytes, the file 39,560"


def test_a_coordinator_without_ranges_sends_the_full_file(served: World) -> None:
    served.coordinator.knows_ranges = False
    served.publish(2, "second")
    served.install(served.roll_out(2))
    assert served.runs() == 2


def test_blocks_that_are_wrong_cost_a_whole_download_and_nothing_else(served: World) -> None:
    """They say what need not be fetched; the hash of the whole says what is right."""
    folder = served.publish(2, "second")
    targets = served.signed.targets.targets
    path = f"{MODEL}/2/model.tflite"
    first = targets[f"{MODEL}/1/model.tflite"].custom
    served.signed.targets.version += 1
    targets[path].unrecognized_fields["custom"] = first
    served.signed.repository.publish(served.signed.signed_targets(), {})
    served.install(served.roll_out(2))
    assert served.runs() == 2
    assert served.bytes_served() == (folder / "model.tflite").stat().st_size


def test_a_cut_download_goes_on_where_it_was_cut(ota: World) -> None:
    size = (ota.publish(1) / "model.tflite").stat().st_size
    offer = ota.roll_out(1)
    ota.coordinator.cut_release_at = 20_000
    with pytest.raises(Unreachable):
        ota.install(offer)
    assert ota.runs() is None
    (report,) = transitions.reports(ota.pointer)
    assert (report.standing, report.code) == ("installing", "")
    (part,) = slots.slot_folder(ota.state_dir, MODEL, "a").glob("model.tflite.*.part")
    have = part.stat().st_size
    assert have > 0
    ota.coordinator.served.clear()
    ota.install(offer)
    assert ota.runs() == 1
    assert ota.bytes_served() == size - have


# -- who decides --


@pytest.mark.parametrize(
    "rollout",
    [
        {"devices": ["another"]},
        {"devices": None, "permille": 0},
        {"action": "roll_back"},
        {"rollout": "another"},
    ],
)
def test_a_release_not_signed_for_this_device_is_not_installed(
    served: World, rollout: dict[str, Any]
) -> None:
    served.publish(2, "second")
    served.roll_out(2, **rollout)
    with pytest.raises(NotSigned):
        served.install(_offer(served, 2))
    assert served.runs() == 1
    assert len(transitions.reports(served.pointer)) == 1


def test_a_share_of_all_devices_is_chosen_by_hash(served: World) -> None:
    from edge_client.wire.rollouts import share_of

    served.publish(2, "second")
    place = share_of("salt", served.who.device)
    served.roll_out(2, devices=None, salt="salt", permille=place)
    with pytest.raises(NotSigned):
        served.install(_offer(served, 2))
    served.install(served.roll_out(2, devices=None, salt="salt", permille=place + 1))
    assert served.runs() == 2


def test_an_online_key_cannot_make_a_device_run_what_was_not_released(
    served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = served.roll_out(1)
    document = {**served.rollouts["rollout-1"], "version": 9, "rollout": "rollout-9"}
    # The holder of a stolen key skips the coordinator's checks.
    monkeypatch.setattr("coordinator.releases.checks.check_rollouts", lambda *_: None)
    served.signed.repository.set_rollouts(MODEL, {"model": MODEL, "rollouts": [document]})
    assert code_of(served, replace(offer, rollout="rollout-9", version=9)) == "unknown_release"


# -- six attacks --


def test_rollback_is_refused(served: World) -> None:
    old = served.metadata("timestamp.json")
    served.publish(2, "second")
    offer = served.roll_out(2)
    served.signed.repository.renew(utc_now() + timedelta(hours=13))
    served.install(_offer(served, 1))  # sees what is there now
    served.serve_again("metadata/timestamp.json", old)
    assert code_of(served, offer) == "rollback"


def test_freeze_is_refused(tmp_path: Path) -> None:
    clock = Clock(utc_now() - timedelta(hours=20))
    with world(tmp_path, clock=clock) as ota:
        ota.publish(1)
        ota.install(ota.roll_out(1))
        clock.at -= timedelta(hours=6)  # a timestamp lives for a day
        ota.publish(2, "second")
        assert refused(ota) == "expired"


def test_tampered_files_are_refused(served: World) -> None:
    folder = served.publish(2, "second")
    offer = served.roll_out(2)
    (file,) = (served.folder / "targets" / MODEL / "2").glob("*.model.tflite")
    path = f"targets/{MODEL}/2/{file.name}"
    served.coordinator.tampered[path] = lambda content: bytes(len(content))
    assert code_of(served, offer) == "tampered"
    served.coordinator.tampered.clear()
    served.install(offer)
    assert served.runs() == 2, "nothing of it is held against the version"
    assert (folder / "model.tflite").exists()


def test_endless_data_is_refused(served: World) -> None:
    served.publish(2, "second")
    offer = served.roll_out(2)
    served.coordinator.tampered["metadata/timestamp.json"] = lambda content: content + b" " * 100_000
    assert code_of(served, offer) == "endless"
    served.coordinator.tampered.clear()
    (file,) = (served.folder / "targets" / MODEL / "2").glob("*.manifest.json")
    served.coordinator.tampered[f"targets/{MODEL}/2/{file.name}"] = lambda content: content + b" " * 100_000
    assert code_of(served, offer) == "endless"


def test_a_wrong_key_is_refused(served: World) -> None:
    served.publish(2, "second")
    offer = served.roll_out(2)
    forged = Metadata.from_bytes(served.metadata("timestamp.json"))
    forged.signed.version += 1
    forged.signatures.clear()
    forged.sign(CryptoSigner.generate_ed25519())
    served.serve_again("metadata/timestamp.json", forged.to_bytes())
    assert code_of(served, offer) == "signature"


def test_mixed_states_are_refused(served: World) -> None:
    """Targets of before beside a snapshot of now: each is signed, together they never were."""
    version = served.signed.targets.version
    old = served.metadata(f"{version}.targets.json")
    served.publish(2, "second")
    offer = served.roll_out(2)
    served.serve_again(f"metadata/{version + 1}.targets.json", old)
    assert code_of(served, offer) == "mix_and_match"


def test_another_first_root_is_not_taken_once_one_is_pinned(served: World, tmp_path: Path) -> None:
    with world(tmp_path / "other") as other:
        other.publish(2, "second")
        offer = replace(served.roll_out(1), rollout="rollout-2", version=2)
        served.coordinator.releases = other.folder
        assert code_of(served, offer) in ("rollback", "signature")


def test_rotated_keys_are_followed(served: World) -> None:
    signers = served.signed.signers
    before = dict(signers)
    for name in signers:
        signers[name] = CryptoSigner.generate_ed25519()
    served.signed.repository.online_keys(rotate=True)
    root = served.signed.signed_root(2, before["root-1"], before["root-2"])
    from coordinator.operator import signed_documents
    from coordinator.releases import roles

    served.signed.targets = signed_documents.next_targets(served.signed.targets, utc_now())
    signed_documents.delegate_rollouts(
        served.signed.targets, served.signed.repository.online_keys()[roles.ROLLOUTS]
    )
    targets = Metadata.from_bytes(served.signed.signed_targets())
    targets.sign(before["targets"], append=True)
    served.signed.repository.publish(targets.to_bytes(), {}, [root.to_bytes()])
    served.publish(2, "second")
    served.install(served.roll_out(2))
    assert served.runs() == 2


def test_the_first_root_may_come_by_another_way(ota: World, tmp_path: Path) -> None:
    ota.publish(1)
    offer = ota.roll_out(1)
    given = tmp_path / "root.json"
    ota.sets.append(f"releases.root={given}")
    with pytest.raises(Postponed, match=r"releases\.root"):
        ota.install(offer)
    with world(tmp_path / "other") as other:
        given.write_bytes(other.metadata("1.root.json"))
        with pytest.raises(Postponed) as raised:
            ota.install(offer)
    assert raised.value.code == "signature"
    given.write_bytes(ota.metadata("1.root.json"))
    ota.install(offer)
    assert ota.runs() == 1


# -- what does not run here --


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"device_classes": ("gateway",)}, "wrong_class"),
        ({"runtimes": ("tflite-micro",)}, "wrong_runtime"),
        ({"memory_bytes": 2**60}, "memory"),
        ({"spoilt": lambda content: b"TFL3" * (len(content) // 4)}, "bad_artifact"),
        (
            {"golden": GoldenRows(Fill(0.5, 0.5), ((0.0,) * 10,), Tolerance(1e-4, 1e-4))},
            "self_test",
        ),
    ],
)
@pytest.mark.slow
def test_a_release_that_does_not_run_here_is_refused_and_never_tried_again(
    served: World, changes: dict[str, Any], code: str
) -> None:
    served.publish(2, "second", **changes)
    offer = served.roll_out(2)
    with pytest.raises(Rejected) as raised:
        served.install(offer, self_test.run)
    assert raised.value.code == code
    assert served.runs() == 1
    active, last = transitions.reports(served.pointer)
    assert (active.version, last.version, last.standing, last.code) == (1, 2, "failed", code)
    assert not transitions.needs_action(served.pointer, offer)
    again = served.roll_out(2, "another")
    assert not transitions.needs_action(served.pointer, again)
    with pytest.raises(NotSigned, match="no signed rollout forces it"):
        served.install(replace(again, force=True))
    forced = served.roll_out(2, "forced", force=True)
    assert transitions.needs_action(served.pointer, forced)
    with pytest.raises(Rejected):
        served.install(forced, self_test.run)
    assert not transitions.needs_action(served.pointer, forced), "once for each rollout that forces"


def test_a_manifest_of_another_version_is_refused(ota: World) -> None:
    folder = released.release_folder(ota.home / "made", 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    ota.signed.publish(folder)
    assert manifest["version"] == 3
    from edge_client.ota.install import _require_consistent
    from edge_client.wire import inference

    target = ota.signed.targets.targets[f"{MODEL}/3/model.tflite"]
    with pytest.raises(Rejected, match="digits:4, its manifest says digits:3"):
        _require_consistent(inference.from_json(json.dumps(manifest)), ReleaseOffer("r", MODEL, 4), target)


@pytest.mark.slow
def test_both_models_are_evaluated_where_the_device_has_held_out_rows(served: World) -> None:
    x, y = released.digits()
    path = served.home / "digits.csv"
    names = ",".join([*(f"p{i}" for i in range(64)), "label"])
    rows = [
        ",".join([*map(str, row.tolist()), str(label)]) for row, label in zip(x[:400], y[:400], strict=True)
    ]
    path.write_text("\n".join([names, *rows]))
    served.sets += ["data.digits.kind=csv", f"data.digits.path={path}", 'data.digits.label="label"']
    served.publish(2, "second")
    served.install(served.roll_out(2), self_test.run)
    found = transitions.reports(served.pointer)[0].evaluation
    assert found is not None and found.champion_correct is not None
    assert found.labels > 20
    assert 0.8 * found.labels < found.correct <= found.labels
    assert 0.8 * found.labels < found.champion_correct <= found.labels
    assert 0 < found.loss_sum < found.labels


def test_a_device_goes_back_to_the_other_slot_without_a_download(served: World) -> None:
    served.publish(2, "second")
    served.install(served.roll_out(2))
    served.coordinator.served.clear()
    served.install(served.roll_out(1, "rollout-2", action="roll_back"))
    assert served.runs() == 1
    assert served.bytes_served() == 0
    active, last = transitions.reports(served.pointer)
    assert (active.version, active.rollout) == (1, "rollout-2")
    assert (last.version, last.standing, last.code) == (2, "rolled_back", "told")


def test_a_device_goes_back_to_no_version_once_its_own_is_withdrawn(served: World) -> None:
    served.signed.withdraw(MODEL, 1)
    served.rollouts.clear()
    offer = served.roll_out(NO_MODEL, "back", action="roll_back")
    models = Releases(served.config, lambda: 0.0, random.Random(7))
    assert models.update_offers([offer]) == [] and [each.offer for each in models.offers()] == [offer]
    assert "no longer runs" in served.install(offer)
    assert models.update_offers([offer]) == [] and models.offers() == ()
    assert not list(served.state_dir.glob(f"releases/{MODEL}/[ab]/*"))
    with pytest.raises(NoRelease, match=r"digits:1 does not run here.* told to run no version"):
        active_release(served.state_dir)


@pytest.mark.parametrize("versions", [(1,), (1, 2)])
def test_the_online_keys_alone_cannot_stop_a_model(served: World, versions: tuple[int, ...]) -> None:
    """Whoever stole them signs that the device is to run nothing; the offline keys still sign for what it runs."""
    for version in versions[1:]:
        served.publish(version, "second")
        served.install(served.roll_out(version))
    offer = served.roll_out(NO_MODEL, "stolen", action="roll_back")
    models = Releases(served.config, lambda: 0.0, random.Random(7))
    models.update_offers([offer])
    words = models.install(served.who.device, served.link, offer, lambda: None)
    assert words == f"told to run no version, but digits:{versions[-1]} is still released; withdraw it first"
    assert served.runs() == versions[-1]
    (report,) = transitions.reports(served.pointer)
    assert (report.version, report.standing, report.code) == (versions[-1], "active", "not_withdrawn")


def test_an_unreadable_order_to_run_nothing_is_reported_for_the_running_version(served: World) -> None:
    """Version 0 in a report would have every check-in refused."""
    offer = served.roll_out(NO_MODEL, "back", action="roll_back")
    served.coordinator.refusals = {"/releases/metadata": (404, "not_found")}
    with pytest.raises(Postponed):
        served.install(offer)
    assert [each.version for each in transitions.reports(served.pointer)] == [1]


def test_going_back_to_what_the_other_slot_does_not_hold_is_an_install(served: World) -> None:
    for version, kind in ((2, "second"), (3, "first")):
        served.publish(version, kind)  # type: ignore[arg-type]
        served.install(served.roll_out(version))
    served.install(served.roll_out(1, "back", action="roll_back"))
    assert served.runs() == 1


@pytest.mark.parametrize("leave_bytes", [0, 2_000, 100_000])
def test_a_full_disk_leaves_the_old_slot(tmp_path: Path, leave_bytes: int) -> None:
    with small_disk(tmp_path / "state", 12), world(tmp_path) as ota:
        ota.publish(1)
        ota.install(ota.roll_out(1))
        ota.publish(2, "second")
        offer = ota.roll_out(2)
        ota.lasts()
        filler = ota.state_dir / "filler"
        fill(filler, leave_bytes=leave_bytes)
        with pytest.raises(Postponed) as raised:
            ota.install(offer)
        assert raised.value.code == "disk"
        assert ota.runs() == 1
        filler.unlink()
        ota.install(offer)
        assert ota.runs() == 2


@pytest.mark.parametrize("room_bytes", [0, 4096, 20_000])
def test_a_disk_that_fills_up_on_the_way_leaves_the_old_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_bytes: int
) -> None:
    """Somebody else writes, so that what was free a moment ago is not."""
    with small_disk(tmp_path / "state", 12), world(tmp_path) as ota:
        ota.publish(1)
        ota.install(ota.roll_out(1))
        ota.publish(2, "second")
        offer = ota.roll_out(2)
        ota.lasts()
        filler = ota.state_dir / "filler"
        before = download.fetch

        def fetch(*given: Any, **named: Any) -> int:
            if not filler.exists():
                fill(filler, leave_bytes=room_bytes)
            return before(*given, **named)

        monkeypatch.setattr(download, "SPARE_BYTES", -1_000_000)
        monkeypatch.setattr(download, "fetch", fetch)
        with pytest.raises(Postponed) as raised:
            ota.install(offer)
        assert raised.value.code == "disk"
        assert ota.runs() == 1
        filler.unlink()
        monkeypatch.setattr(download, "fetch", before)
        ota.install(offer)
        assert ota.runs() == 2


def test_a_release_that_is_too_large_leaves_the_other_slot_as_it_is(served: World) -> None:
    served.publish(2, "second")
    served.install(served.roll_out(2))
    served.publish(3)
    served.sets.append("download_bytes=1000")
    with pytest.raises(Rejected) as raised:
        served.install(served.roll_out(3))
    assert raised.value.code == "limits"
    served.install(served.roll_out(1, "back", action="roll_back"))
    assert served.runs() == 1
    assert served.bytes_served() == 6 * 1024, "of version 2: version 1 was here still"


@pytest.mark.parametrize("name", ["model.tflite", "manifest.json"])
def test_a_slot_that_was_damaged_is_fetched_anew_on_the_way_back(served: World, name: str) -> None:
    """What the disk did to a file says nothing about the version."""
    served.publish(2, "second")
    served.install(served.roll_out(2))
    (slots.slot_folder(served.state_dir, MODEL, "a") / name).write_bytes(b"torn")
    served.install(served.roll_out(1, "back", action="roll_back"), self_test.run)
    assert served.runs() == 1
    assert served.pointer.failed == ()


def test_a_model_may_be_called_as_anything_beside_it(ota: World) -> None:
    """Signed metadata, of the delegated role too, lies where no model's folder can be."""
    ota.publish(1, model="tuf")
    entry = {"rollout": "r", "version": 1, "action": "install", "devices": [ota.who.device]}
    ota.signed.repository.set_rollouts("tuf", {"model": "tuf", "rollouts": [entry]})
    ota.install(ReleaseOffer("r", "tuf", 1))
    assert slots.models(ota.state_dir) == ("tuf",)
    kept = {path.name for path in ota.state_dir.rglob("*.json")}
    assert {"rollouts.json", "targets.json", "snapshot.json", "pinned.root.json"} <= kept


def test_a_hash_that_is_none_names_no_file() -> None:
    """Our coordinator publishes none such; a device does not count on it."""

    class Signed:
        def target(self, path: str) -> TargetFile:
            return TargetFile(10, {"sha256": "../../../up"}, path)

    signed: Any = Signed()
    with pytest.raises(Postponed) as raised:
        install._target(signed, f"{MODEL}/2/model.tflite", 100)
    assert raised.value.code == "malformed"


def test_offers_of_models_that_nobody_signed_fill_no_disk(
    served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "MAX_MODELS", 3)
    served.coordinator.refusals = {"/releases/metadata": (404, "not_found")}
    for number in range(5):
        with pytest.raises(Postponed):
            served.install(ReleaseOffer("r", f"other-{number}", 1))
    assert len(slots.models(served.state_dir)) == 3
    with pytest.raises(Postponed):
        served.install(ReleaseOffer("r", MODEL, 2))
    assert transitions.reports(served.pointer)[1].standing == "installing"
