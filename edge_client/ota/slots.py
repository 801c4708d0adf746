"""Two slots a model on disk, and the pointer that names the active one. A power cut at any moment leaves a working model.

    releases/<model>/a/  b/          manifest.json and model.tflite each
    releases/<model>/pointer.json    `edge_client.ota.transitions.Pointer`, with its own SHA-256
    releases/<model>/pointer.copy.json    a copy, in case the first file rots

A new version is written into the slot that is not active, and tested there; then one durable rename of `pointer.json`
activates it, on trial. Until it has passed its trial one more such rename goes back, and the slot that this leads to
is not written: no other version is installed during a trial (`edge_client.ota.transitions`).
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from edge_client.files import file_sha256, make_folder, write_durably
from edge_client.ota.transitions import FORMAT, Pointer, Slot, SlotName
from edge_client.wire import inference
from edge_client.wire.manifest import ManifestError
from edge_client.wire.rollouts import MANIFEST_NAME, MODEL_NAME, is_release
from edge_client.wire.strict import InvalidDocument, loads, parse

POINTER_NAME = "pointer.json"
COPY_NAME = "pointer.copy.json"
_HASH_KEY = "sha256"
_GONE = (errno.ENOENT, errno.EIO)
"""Errors of a file that is lost for good; all others may pass."""
_FORMAT_WITHOUT_PROVED = 1


def folder_of(state_dir: Path, model: str) -> Path:
    return state_dir / "releases" / model


def slot_folder(state_dir: Path, model: str, name: SlotName) -> Path:
    return folder_of(state_dir, model) / name


def active_folder(state_dir: Path, model: str) -> Path | None:
    """The folder of the active release, to predict with; None: there is none."""
    pointer = read(state_dir, model)
    return slot_folder(state_dir, model, pointer.active) if pointer.active is not None else None


def models(state_dir: Path) -> tuple[str, ...]:
    """Models that this device was ever told to run."""
    folder = state_dir / "releases"
    if not folder.is_dir():
        return ()
    files = (each for name in (POINTER_NAME, COPY_NAME) for each in folder.glob(f"*/{name}"))
    return tuple(sorted({each.parent.name for each in files}))


def read(state_dir: Path, model: str) -> Pointer:
    """The model's pointer; an empty one if there is none that this software can read.

    Raises:
        OSError: for a possibly temporary reason.
    """
    folder = folder_of(state_dir, model)
    pointers = (_read(folder / name, model) for name in (POINTER_NAME, COPY_NAME))
    return next((each for each in pointers if each is not None), Pointer(model))


def _read(path: Path, model: str) -> Pointer | None:
    """The pointer in one file; None: the file is missing or damaged."""
    try:
        document = loads(path.read_bytes(), str(path))
        stated_hash = document.pop(_HASH_KEY, None) if isinstance(document, dict) else None
        pointer = parse(Pointer, document, str(path))
    except InvalidDocument:
        return None
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None
    if pointer.format == _FORMAT_WITHOUT_PROVED and stated_hash is None:
        pointer = _with_proved(pointer)
    elif stated_hash != _hash(document):
        return None
    if pointer.format != FORMAT or pointer.model != model:
        return None
    return pointer if pointer.active is None or pointer.running is not None else replace(pointer, active=None)


def _hash(document: object) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _with_proved(pointer: Pointer) -> Pointer:
    """Upgrades a pointer of the first format, whose slots did not record whether they passed their trial."""

    def upgrade(slot: Slot | None, name: SlotName) -> Slot | None:
        on_trial = name == pointer.active and pointer.trial_starts is not None
        return None if slot is None else replace(slot, proved=not on_trial)

    return replace(pointer, a=upgrade(pointer.a, "a"), b=upgrade(pointer.b, "b"), format=FORMAT)


def write(state_dir: Path, pointer: Pointer) -> None:
    """Makes the pointer durable.

    Raises:
        OSError: the disk is full; the pointer is as it was.
    """
    assert is_release(pointer.model, 1)
    folder = folder_of(state_dir, pointer.model)
    make_folder(folder)
    content = _encode(pointer)
    # The copy is read only if the pointer is damaged: until the pointer is renamed nothing has changed.
    for name in (COPY_NAME, POINTER_NAME):
        write_durably(folder / name, content, mode=0o600)


def repair(state_dir: Path, model: str) -> str:
    """Rewrites both files if one of them is lost or damaged. Returns a description of the damage; empty: none.

    Raises:
        OSError: as `read` and `write`.
    """
    folder = folder_of(state_dir, model)
    first, second = (_read(folder / name, model) for name in (POINTER_NAME, COPY_NAME))
    sound = first or second
    if sound is None:
        write(state_dir, Pointer(model))
        return f"{folder / POINTER_NAME} and its copy are damaged; the coordinator is asked again which version to run"
    if first != second:
        write(state_dir, sound)
    return (
        ""
        if first is not None
        else f"{folder / POINTER_NAME} was damaged and has been restored from its copy"
    )


def is_intact(
    state_dir: Path, pointer: Pointer, name: SlotName, check_cancelled: Callable[[], None] = lambda: None
) -> bool:
    """Whether the slot's files are the signed ones.

    Raises:
        OSError: for a possibly temporary reason.
    """
    slot, folder = pointer.slot(name), slot_folder(state_dir, pointer.model, name)
    assert slot is not None
    try:
        content = (folder / MANIFEST_NAME).read_bytes()
        if slot.manifest_sha256 not in ("", hashlib.sha256(content).hexdigest()):
            return False
        manifest = inference.from_json(content)
        return (
            manifest.version == slot.version
            and file_sha256(folder / MODEL_NAME, check_cancelled) == manifest.file.sha256
        )
    except ManifestError:
        return False
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return False


def _encode(pointer: Pointer) -> bytes:
    document = asdict(pointer)
    document[_HASH_KEY] = _hash(document)
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
