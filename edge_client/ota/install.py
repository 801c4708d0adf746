"""Installs one offer, from the hint in a check-in to the active slot.

    1  refresh the signed repository and look up this offer for this device              repository
    2  once no version is on trial, mark the spare slot empty                            transitions, slots
    3  fetch the manifest: is it for this device class, runtime, memory?                 download
    4  fetch the model file, with as few bytes as possible                               download
    5  self-test on this runtime, in a child process; evaluate on held-out rows          self_test
    6  activate it on trial, with one durable rename                                     slots

Killed at any point, the device starts with the slot that was active, or with the new one that passed. A version that
cannot run here is remembered and not tried again unless forced. A failure to fetch or trust says nothing about the
version: it is tried again later.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.failpoints import reach
from edge_client.files import NO_ROOM, make_folder, sync_file, sync_folder
from edge_client.ota import download, slots, transitions
from edge_client.ota.errors import TRANSIENT_CODES, NotSigned, NotWithdrawn, Postponed, Rejected
from edge_client.ota.repository import FOLDER, Repository
from edge_client.ota.self_test import SelfTestJob, SelfTestResult
from edge_client.ota.transitions import Pointer, Slot
from edge_client.train.interpreter import installed_kind
from edge_client.transport.link import Link
from edge_client.wire import inference, rollouts
from edge_client.wire.device import ReleaseOffer
from edge_client.wire.inference import InferenceManifest
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

    from edge_client.config import EdgeConfig

MANIFEST_BYTES = 32_000_000
"""Largest manifest accepted; most of it is golden rows."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

MAX_MODELS = 100
"""Postponed offers of unsigned models are remembered for at most so many models: a coordinator could invent any number."""

RunSelfTest = Callable[[SelfTestJob, Callable[[], None]], SelfTestResult]
"""`edge_client.ota.self_test.run`."""


@dataclass(frozen=True)
class Device:
    """The device to install on. `id`: as enrolled."""

    id: str
    config: EdgeConfig
    run_self_test: RunSelfTest


def install(device: Device, link: Link, offer: ReleaseOffer, check_cancelled: Callable[[], None]) -> str:
    """Carries out the offer, if the signed repository confirms it. Returns a description of what was done.

    Raises:
        NotSigned: the repository does not confirm it.
        NotWithdrawn: it orders to run no version, but the release was not withdrawn.
        Rejected: the version does not run here; remembered, the active slot is unchanged.
        Postponed: not now; the active slot is unchanged.
        Unreachable, ServerRefused, CertificateExpired: no answer; partial downloads are kept.
        OSError: the disk failed, other than by being full.
    """
    state_dir = device.config.state_dir
    try:
        return _install(device, link, offer, check_cancelled)
    except Rejected as rejected:
        pointer = slots.read(state_dir, offer.model)
        pointer = transitions.record_failure(pointer, offer, rejected.code, rejected.message)
        slots.write(state_dir, pointer)
        if pointer.spare is None:  # else it was rejected before anything was fetched
            _clear(slots.slot_folder(state_dir, offer.model, pointer.spare_name), ())
        raise
    except Postponed as postponed:
        known = slots.models(state_dir)
        if offer.model in known or len(known) < MAX_MODELS:
            # On a full disk not even this can be stored; the daemon reports it all the same.
            with suppress(OSError):
                pointer = slots.read(state_dir, offer.model)
                slots.write(
                    state_dir, transitions.postpone(pointer, offer, postponed.code, postponed.message)
                )
        raise


def _install(device: Device, link: Link, offer: ReleaseOffer, check_cancelled: Callable[[], None]) -> str:
    state_dir, root = device.config.state_dir, device.config.releases.root
    what = f"{offer.model}:{offer.version}"
    try:
        repository = Repository(
            state_dir / "releases" / FOLDER,
            link,
            root=Path(root) if root else None,
            check_cancelled=check_cancelled,
        )
        repository.refresh()
        signed = repository.signed_rollout(offer, device.id)
        if signed is None:
            raise NotSigned(f"{what} was offered, but no signed rollout says so for this device")
        reach("install.trusted")
        pointer = slots.read(state_dir, offer.model)
        if offer.version == rollouts.NO_MODEL:
            return _deactivate(device, repository, pointer, offer)
        if pointer.running is not None and pointer.running.version == offer.version:
            slots.write(state_dir, transitions.assign_rollout(pointer, offer.rollout))
            return f"{what} runs already"
        failure = pointer.failure(offer.version)
        if failure is not None and not signed.force:
            slots.write(state_dir, transitions.report_known_failure(pointer, offer))
            raise NotSigned(f"{what} failed here before ({failure.code}), and no signed rollout forces it")
        if transitions.must_wait(pointer, offer):
            assert pointer.running is not None
            raise Postponed(
                "on_trial",
                f"version {pointer.running.version} is on trial; another is installed after the trial",
            )
        spare = pointer.spare
        if spare is not None and spare.version == offer.version:
            message = _switch_back(device, pointer, spare, offer, check_cancelled)
            if message is not None:
                return message
        return _fetch_and_test(device, link, repository, pointer, offer, check_cancelled)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise Postponed("disk", f"this device's disk: {error.strerror}") from None


def _switch_back(
    device: Device, pointer: Pointer, spare: Slot, offer: ReleaseOffer, check_cancelled: Callable[[], None]
) -> str | None:
    """Switches to the version in the other slot, without a download.

    None: it no longer passes. The disk may be at fault, so the release is fetched and tested like any other.

    Raises:
        Postponed: it does not pass now, and the slot keeps it.
    """
    state_dir = device.config.state_dir
    folder = slots.slot_folder(state_dir, pointer.model, pointer.spare_name)
    if not slots.is_intact(state_dir, pointer, pointer.spare_name, check_cancelled):
        return None
    try:
        manifest = _manifest(folder / MANIFEST_NAME)
        result = device.run_self_test(SelfTestJob(folder, manifest.memory_bytes), check_cancelled)
    except Rejected as rejected:
        if rejected.code in TRANSIENT_CODES:
            raise Postponed(rejected.code, rejected.message) from None
        return None
    except OSError:
        return None
    reach("install.turning")
    slot = replace(spare, rollout=offer.rollout, golden_accuracy=result.golden_accuracy)
    slots.write(state_dir, transitions.switch_back(pointer, slot))
    reach("install.turned")
    return f"{pointer.model}:{spare.version} runs again"


def _deactivate(device: Device, repository: Repository, pointer: Pointer, offer: ReleaseOffer) -> str:
    """Stops running any version, if the publishers have withdrawn the versions that this device has.

    Rollouts are signed by an online key. A thief of that key can choose among releases, but cannot stop them all.

    Raises:
        NotWithdrawn: a version that the device has is still released; it keeps that version.
    """
    state_dir = device.config.state_dir
    released = [
        slot.version
        for slot in (pointer.running, pointer.spare)
        if slot is not None
        and repository.target(rollouts.model_path(pointer.model, slot.version)) is not None
    ]
    if released:
        message = (
            f"told to run no version, but {pointer.model}:{released[0]} is still released; withdraw it first"
        )
        slots.write(state_dir, transitions.keep_active(pointer, offer, "not_withdrawn", message))
        raise NotWithdrawn(message)
    reach("install.turning")
    slots.write(state_dir, transitions.deactivate(pointer))
    reach("install.turned")
    for name in ("a", "b"):
        _clear(slots.slot_folder(state_dir, pointer.model, name), ())
    return f"{pointer.model} no longer runs: there was no version before"


def _fetch_and_test(
    device: Device,
    link: Link,
    repository: Repository,
    pointer: Pointer,
    offer: ReleaseOffer,
    check_cancelled: Callable[[], None],
) -> str:
    state_dir, config = device.config.state_dir, device.config
    manifest_target = _target(repository, rollouts.manifest_path(offer.model, offer.version), MANIFEST_BYTES)
    model_target = _target(repository, rollouts.model_path(offer.model, offer.version), config.download_bytes)
    if pointer.active is not None and not slots.is_intact(
        state_dir, pointer, pointer.active, check_cancelled
    ):
        # The other slot may hold the only version left.
        slots.write(state_dir, transitions.discard_damaged(pointer, pointer.active))
        raise Postponed("damaged", "the files of the running version were damaged on this device's disk")
    slots.write(state_dir, transitions.begin_install(pointer, offer))
    reach("install.begun")
    folder = slots.slot_folder(state_dir, offer.model, pointer.spare_name)
    make_folder(folder)
    paths = {MANIFEST_NAME: manifest_target, MODEL_NAME: model_target}
    parts = [download.part_of(folder / name, each).name for name, each in paths.items()]
    _clear(folder, (*paths, *parts))
    download.fetch(link, manifest_target, folder / MANIFEST_NAME, check_cancelled=check_cancelled)
    reach("install.manifest")
    manifest = _manifest(folder / MANIFEST_NAME)
    _require_consistent(manifest, offer, model_target)
    _require_compatible(manifest, config)
    champion = slots.active_folder(state_dir, offer.model)
    base = champion / MODEL_NAME if champion is not None else None
    transferred = download.fetch(
        link, model_target, folder / MODEL_NAME, base=base, check_cancelled=check_cancelled
    )
    for name in paths:
        sync_file(folder / name)
    sync_folder(folder)
    reach("install.fetched")
    data = config.data.get(manifest.dataset) if manifest.dataset else None
    result = device.run_self_test(SelfTestJob(folder, manifest.memory_bytes, champion, data), check_cancelled)
    reach("install.tested")
    slot = Slot(
        offer.version,
        offer.rollout,
        result.golden_accuracy,
        result.evaluation,
        manifest_sha256=manifest_target.hashes["sha256"],
    )
    reach("install.flipping")
    slots.write(state_dir, transitions.activate(slots.read(state_dir, offer.model), slot))
    reach("install.flipped")
    fetched = f"{transferred} of {model_target.length} bytes fetched"
    return f"{offer.model}:{offer.version} runs, {fetched}" + (f"; {result.note}" if result.note else "")


def _target(repository: Repository, path: str, max_bytes: int) -> TargetFile:
    target = repository.target(path)
    if target is None:
        raise Postponed("unknown_release", f"{path} is not signed by the publishers")
    if target.length > max_bytes:
        raise Rejected("limits", f"{path} is {target.length} bytes long, this device accepts {max_bytes}")
    # It becomes part of a file name.
    if not _SHA256.fullmatch(target.hashes.get("sha256", "")):
        raise Postponed("malformed", f"{path} is signed without a SHA-256")
    return target


def _manifest(path: Path) -> InferenceManifest:
    try:
        return inference.from_json(path.read_bytes())
    except ManifestError as error:
        raise Rejected("bad_artifact", printable(str(error), 300)) from None


def _require_consistent(manifest: InferenceManifest, offer: ReleaseOffer, target: TargetFile) -> None:
    if (manifest.model, manifest.version) != (offer.model, offer.version):
        raise Rejected(
            "bad_artifact",
            f"released as {offer.model}:{offer.version}, its manifest says {printable(manifest.model, 70)}:{manifest.version}",
        )
    if (manifest.file.size_bytes, manifest.file.sha256) != (target.length, target.hashes["sha256"]):
        raise Rejected(
            "bad_artifact", "its manifest describes a model file other than the one released with it"
        )


def _require_compatible(manifest: InferenceManifest, config: EdgeConfig) -> None:
    """Checks class, runtime and memory before the large file is fetched. Only the self-test checks the answers."""
    if manifest.device_classes and config.device_class not in manifest.device_classes:
        classes = printable(", ".join(manifest.device_classes), 100)
        raise Rejected(
            "wrong_class", f"it is for {classes}; this device is {config.device_class or 'of no class'}"
        )
    installed = installed_kind()
    if installed not in manifest.runtimes:
        known = ", ".join(manifest.runtimes) or "no runtime"
        raise Rejected("wrong_runtime", f"it is for {known}; this device has {installed or 'none'}")
    available = config.memory_bytes
    if manifest.memory_bytes > available:
        raise Rejected(
            "memory", f"it needs {manifest.memory_bytes} bytes of memory, this device has {available} for it"
        )


def _clear(folder: Path, keep: tuple[str, ...]) -> None:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name in keep:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
