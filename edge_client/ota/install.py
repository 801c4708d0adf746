"""One offer, from the hint in a check-in to the active slot.

    1  the signed repository is read, and what it says of this offer for this device     repository
    2  the spare slot is marked empty                                                    slots
    3  the manifest comes: is it for this class, runtime, memory?
    4  the model file comes, by as few bytes as will do                                  download
    5  self-test on this very runtime, in a child; evaluation on held-out rows           proof
    6  one durable rename makes it the active one, on trial                              slots

Killed at any point, the device starts with the slot that was active, or with the new one that passed. A version that
cannot run here is remembered and not tried again unless forced. What cannot be trusted or fetched says nothing about the
version: it is tried again later.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from edge_client.config import EdgeConfig
from edge_client.failpoints import reach
from edge_client.files import NO_ROOM, make_folder, sync_file, sync_folder
from edge_client.infer.installed import installed_kind
from edge_client.link import Link
from edge_client.ota import download, slots
from edge_client.ota.proof import Proof, Question
from edge_client.ota.repository import FOLDER, Repository
from edge_client.ota.slots import Pointer, Slot
from edge_client.ota.trouble import NotSigned, PutOff, Unfit
from edge_client.wire import inference, rollouts
from edge_client.wire.device import ReleaseOffer
from edge_client.wire.inference import MANIFEST_NAME, MODEL_NAME, InferenceManifest
from edge_client.wire.manifest import ManifestError
from edge_client.wire.strict import printable

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

MANIFEST_BYTES = 32_000_000
"""Largest manifest that is read; its golden rows are most of it."""

_SHA256 = re.compile(r"[0-9a-f]{64}")

MOST_MODELS = 100
"""What nobody signed for is remembered of no more models than this: whoever offers them may think of any number."""

Prove = Callable[[Question, Callable[[], None]], Proof]
"""`edge_client.ota.proof.prove`."""


@dataclass(frozen=True)
class Device:
    """Whom an installation is for. `id`: as enrolled."""

    id: str
    config: EdgeConfig
    prove: Prove


def install(device: Device, link: Link, offer: ReleaseOffer, going: Callable[[], None]) -> str:
    """Does what the offer says, as far as the signed repository says it too. What was done, in words.

    Raises:
        NotSigned: the repository says no such thing.
        Unfit: it does not run here; remembered, the active slot is as it was.
        PutOff: not now; the active slot is as it was.
        Unreachable, ServerRefused, CertificateExpired: no answer; what came is kept.
        OSError: the disk, but for a full one.
    """
    state_dir = device.config.state_dir
    try:
        return _installed(device, link, offer, going)
    except Unfit as unfit:
        pointer = slots.failed(slots.read(state_dir, offer.model), offer, unfit.code, unfit.words)
        slots.write(state_dir, pointer)
        if pointer.spare is None:  # else it was refused before anything of it came
            _clear(slots.slot_folder(state_dir, offer.model, pointer.spare_name), ())
        raise
    except PutOff as trouble:
        known = slots.models(state_dir)
        if offer.model in known or len(known) < MOST_MODELS:
            # On a full disk not even this can be kept; the daemon says it all the same.
            with suppress(OSError):
                pointer = slots.read(state_dir, offer.model)
                slots.write(state_dir, slots.put_off(pointer, offer, trouble.code, trouble.words))
        raise


def _installed(device: Device, link: Link, offer: ReleaseOffer, going: Callable[[], None]) -> str:
    state_dir, root = device.config.state_dir, device.config.releases.root
    what = f"{offer.model}:{offer.version}"
    try:
        repository = Repository(
            state_dir / "releases" / FOLDER, link, root=Path(root) if root else None, going=going
        )
        repository.refresh()
        signed = repository.rollout_of(offer, device.id)
        if signed is None:
            raise NotSigned(f"{what} was offered, but what is signed does not say that for this device")
        reach("install.trusted")
        pointer = slots.read(state_dir, offer.model)
        if offer.version == rollouts.NO_MODEL:
            return _give_up(device, pointer)
        if pointer.running is not None and pointer.running.version == offer.version:
            slots.write(state_dir, slots.renamed(pointer, offer.rollout))
            return f"{what} runs already"
        failure = pointer.failure(offer.version)
        if failure is not None and not signed.force:
            slots.write(state_dir, slots.told_failed(pointer, offer))
            raise NotSigned(
                f"{what} failed here before ({failure.code}), and nobody signed that it is to be forced"
            )
        spare = pointer.spare
        if spare is not None and spare.version == offer.version:
            words = _turned(device, pointer, spare, offer, going)
            if words is not None:
                return words
        return _fetch_and_test(device, link, repository, pointer, offer, going)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise PutOff("disk", f"this device's disk: {error.strerror}") from None


def _turned(
    device: Device, pointer: Pointer, spare: Slot, offer: ReleaseOffer, going: Callable[[], None]
) -> str | None:
    """The other slot holds that version: the way back, or forth, without a download.

    None: what it holds passes no more. That may be the disk's fault, so the release is to be fetched and tested as any other.
    """
    state_dir = device.config.state_dir
    folder = slots.slot_folder(state_dir, pointer.model, pointer.spare_name)
    try:
        manifest = _manifest(folder / MANIFEST_NAME)
        proof = device.prove(Question(folder, manifest.memory_bytes), going)
    except (Unfit, OSError):
        return None
    reach("install.turning")
    slot = Slot(spare.version, offer.rollout, proof.golden_accuracy, spare.evaluation)
    slots.write(state_dir, slots.turned_back(pointer, slot))
    reach("install.turned")
    return f"{pointer.model}:{spare.version} runs again"


def _give_up(device: Device, pointer: Pointer) -> str:
    """No version runs any more."""
    state_dir = device.config.state_dir
    reach("install.turning")
    slots.write(state_dir, slots.given_up(pointer))
    reach("install.turned")
    for name in ("a", "b"):
        _clear(slots.slot_folder(state_dir, pointer.model, name), ())
    return f"{pointer.model} runs no more: there was no version before"


def _fetch_and_test(
    device: Device,
    link: Link,
    repository: Repository,
    pointer: Pointer,
    offer: ReleaseOffer,
    going: Callable[[], None],
) -> str:
    state_dir, config = device.config.state_dir, device.config
    described = _target(repository, rollouts.manifest_path(offer.model, offer.version), MANIFEST_BYTES)
    target = _target(repository, rollouts.model_path(offer.model, offer.version), config.download_bytes)
    slots.write(state_dir, slots.begun(pointer, offer))
    reach("install.begun")
    folder = slots.slot_folder(state_dir, offer.model, pointer.spare_name)
    make_folder(folder)
    paths = {MANIFEST_NAME: described, MODEL_NAME: target}
    parts = [download.part_of(folder / name, each).name for name, each in paths.items()]
    _clear(folder, (*paths, *parts))
    download.fetch(link, described, folder / MANIFEST_NAME, going=going)
    reach("install.manifest")
    manifest = _manifest(folder / MANIFEST_NAME)
    _require_same(manifest, offer, target)
    _require_fitting(manifest, config)
    champion = slots.active_folder(state_dir, offer.model)
    base = champion / MODEL_NAME if champion is not None else None
    fetched = download.fetch(link, target, folder / MODEL_NAME, base=base, going=going)
    for name in paths:
        sync_file(folder / name)
    sync_folder(folder)
    reach("install.fetched")
    data = config.data.get(manifest.dataset) if manifest.dataset else None
    proof = device.prove(Question(folder, manifest.memory_bytes, champion, data), going)
    reach("install.tested")
    slot = Slot(offer.version, offer.rollout, proof.golden_accuracy, proof.evaluation)
    reach("install.flipping")
    slots.write(state_dir, slots.committed(slots.read(state_dir, offer.model), slot))
    reach("install.flipped")
    came = f"{fetched.came_bytes} of {fetched.size_bytes} bytes fetched"
    return f"{offer.model}:{offer.version} runs, {came}" + (f"; {proof.note}" if proof.note else "")


def _target(repository: Repository, path: str, most_bytes: int) -> TargetFile:
    target = repository.target(path)
    if target is None:
        raise PutOff("unknown_release", f"{path} is not signed by those who release")
    if target.length > most_bytes:
        raise Unfit("limits", f"{path} is {target.length} bytes long, this device takes {most_bytes}")
    # It becomes part of a file's name here.
    if not _SHA256.fullmatch(target.hashes.get("sha256", "")):
        raise PutOff("malformed", f"{path} is signed without a SHA-256")
    return target


def _manifest(path: Path) -> InferenceManifest:
    try:
        return inference.from_json(path.read_bytes())
    except ManifestError as error:
        raise Unfit("bad_artifact", printable(str(error), 300)) from None


def _require_same(manifest: InferenceManifest, offer: ReleaseOffer, target: TargetFile) -> None:
    """The signed files belong together, and are what their names say."""
    if (manifest.model, manifest.version) != (offer.model, offer.version):
        raise Unfit(
            "bad_artifact",
            f"released as {offer.model}:{offer.version}, its manifest says {printable(manifest.model, 70)}:{manifest.version}",
        )
    if (manifest.file.size_bytes, manifest.file.sha256) != (target.length, target.hashes["sha256"]):
        raise Unfit("bad_artifact", "its manifest describes another model file than the one released with it")


def _require_fitting(manifest: InferenceManifest, config: EdgeConfig) -> None:
    """Before the large file is fetched. Only the self-test says whether the answers are right."""
    if manifest.device_classes and config.device_class not in manifest.device_classes:
        wanted = printable(", ".join(manifest.device_classes), 100)
        raise Unfit(
            "wrong_class", f"it is for {wanted}; this device is {config.device_class or 'of no class'}"
        )
    here = installed_kind()
    if here not in manifest.runtimes:
        known = ", ".join(manifest.runtimes) or "no runtime"
        raise Unfit("wrong_runtime", f"it is for {known}; this device has {here or 'none'}")
    available = available_memory(config)
    if manifest.memory_bytes > available:
        raise Unfit(
            "memory", f"it needs {manifest.memory_bytes} bytes of memory, this device has {available} for it"
        )


def available_memory(config: EdgeConfig) -> int:
    """What a model may use here: `limits.memory_bytes`, and no more than the machine has."""
    total = int(psutil.virtual_memory().total)
    return min(config.limits.memory_bytes or total, total)


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
