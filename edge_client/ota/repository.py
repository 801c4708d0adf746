"""What the signed repository says, and nothing that it does not: TUF's client over the pinned connection.

    root       the first one is pinned, from the configuration or at first contact; later ones must be signed by it
    refresh    root ─► timestamp ─► snapshot ─► targets, each checked by `tuf.ngclient` (TUF specification 1.0.33, section 5)
    rollouts   who is to run what, signed by a delegated role: what makes an offer more than a hint
    targets    length, SHA-256 and blocks of a release's files

The connection is the coordinator's own and authenticated; that is not what makes a release trusted. Whoever holds the
coordinator, its certificates and its online keys, still cannot make a device run a file that the offline keys did not sign.

Expiry is judged by this machine's clock.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tuf.api import exceptions
from tuf.ngclient import Updater
from tuf.ngclient.fetcher import FetcherInterface

from edge_client.failures import ServerRefused
from edge_client.files import make_folder, sync_file, sync_folder, write_durably
from edge_client.link import Link
from edge_client.ota.trouble import PutOff
from edge_client.wire import rollouts
from edge_client.wire.rollouts import Rollout
from edge_client.wire.strict import Unfit, printable

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

    from edge_client.wire.device import ReleaseOffer

PATH = "/releases"
FOLDER = "_tuf"
"""Beside the models' folders, none of which can be called so."""

_PINNED = "pinned.root.json"
_NOT_FOUND = 404


class Repository:
    """The repository as it is now; `refresh` comes first. `folder` keeps what was trusted, against going back."""

    def __init__(
        self,
        folder: Path,
        link: Link,
        *,
        root: Path | None = None,
        going: Callable[[], None] = lambda: None,
    ) -> None:
        """`root`: a file with the first root; None: the pinned one, or else what the coordinator shows at first contact."""
        self._folder = folder
        self._link = link
        self._root = root
        self._fetcher = _OverLink(link, going)
        self._updater: Updater | None = None

    def refresh(self) -> None:
        """Reads and checks root, timestamp, snapshot and targets.

        Raises:
            PutOff: `expired`, `rollback`, `signature`, `mix_and_match`, `endless`, `missing` and others; `root`: the
                configured one cannot be read.
            OSError: the disk.
        """
        pinned = self._folder / _PINNED
        if self._root is None and not pinned.exists():
            # What an unpinned root vouched for vouches for nothing.
            shutil.rmtree(self._folder, ignore_errors=True)
        make_folder(self._folder)
        first = self._first_root(pinned)
        with self._judged():
            self._updater = Updater(
                str(self._folder),
                "metadata/",
                fetcher=self._fetcher,
                target_base_url="targets/",
                bootstrap=first,
            )
            self._updater.refresh()
        if self._root is None and not pinned.exists():
            write_durably(pinned, first, mode=0o600)
        self._make_durable()

    def rollout_of(self, offer: ReleaseOffer, device: str) -> Rollout | None:
        """What is signed of an offer for this device; None: nothing such is."""
        target = self.target(rollouts.rollouts_path(offer.model))
        if target is None:
            return None
        if target.length > rollouts.LARGEST_DOCUMENT_BYTES:
            raise PutOff("endless", f"{target.path} is {target.length} bytes long")
        path = self._folder / ".rollouts"  # no name of a role's metadata
        with self._judged():
            assert self._updater is not None
            self._updater.download_target(target, str(path))
        try:
            signed = rollouts.from_json(path.read_bytes(), offer.model)
        except Unfit as error:
            raise PutOff("malformed", printable(str(error))) from None
        finally:
            path.unlink()
        return next(
            (
                each
                for each in signed.rollouts
                if each.rollout == offer.rollout
                and (each.version, each.action) == (offer.version, offer.action)
                and each.is_for(device)
            ),
            None,
        )

    def target(self, path: str) -> TargetFile | None:
        """What is signed of one file; None: no such file is."""
        assert self._updater is not None
        with self._judged():
            return self._updater.get_targetinfo(path)

    def _first_root(self, pinned: Path) -> bytes:
        if self._root is not None:
            try:
                return self._root.read_bytes()
            except OSError as error:
                raise PutOff(
                    "root",
                    f"releases.root = {self._root} cannot be read: {error.strerror}; expected the first root",
                ) from None
        if pinned.exists():
            return pinned.read_bytes()
        try:
            return self._link.content(f"{PATH}/root")
        except ServerRefused as refused:
            if refused.status != _NOT_FOUND:
                raise
            raise PutOff("missing", f"the coordinator has no releases: {refused.words}") from None

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """What tuf found wrong, as a PutOff with its code."""
        try:
            yield
        except (exceptions.RepositoryError, exceptions.DownloadError) as error:
            code = _code(error, self._fetcher.last)
            raise PutOff(code, printable(f"{_MEANING[code]}: {error}")) from None

    def _make_durable(self) -> None:
        """What was trusted protects against older metadata, after a power cut too."""
        for path in (*self._folder.glob("*.json"), *(self._folder / "root_history").glob("*.json")):
            sync_file(path)
        sync_folder(self._folder)
        for leftover in self._folder.glob("tmp*"):
            leftover.unlink(missing_ok=True)  # of a write that a power cut ended


class _OverLink(FetcherInterface):
    """Fetches by the pinned connection. How much of a file is read is limited by whoever asks for it."""

    def __init__(self, link: Link, going: Callable[[], None]) -> None:
        self._link = link
        self._going = going
        self.last = ""

    def _fetch(self, url: str) -> Iterator[bytes]:
        self.last = url
        try:
            with self._link.stream(f"{PATH}/{url}") as stream:
                for chunk in stream.chunks:
                    self._going()
                    yield chunk
        except ServerRefused as refused:
            # Only this says that there is no such file; a 403, say, is about this device.
            if refused.status != _NOT_FOUND:
                raise
            raise exceptions.DownloadHTTPError(f"there is no {url}", refused.status) from None


def _code(error: Exception, last: str) -> str:
    """`last`: what was fetched last."""
    role = last.rpartition("/")[2].removesuffix(".json").rpartition(".")[2]
    match error:
        case exceptions.ExpiredMetadataError():
            return "expired"
        case exceptions.UnsignedMetadataError():
            return "signature"
        case exceptions.BadVersionNumberError():
            return "rollback" if role in ("timestamp", "snapshot", "root") else "mix_and_match"
        case exceptions.LengthOrHashMismatchError():
            return "mix_and_match" if last.startswith("metadata/") else "tampered"
        case exceptions.DownloadLengthMismatchError():
            return "endless"
        case exceptions.DownloadHTTPError():
            return "missing"
    return "malformed"


_MEANING = {
    "expired": "what is shown is out of date, as if somebody held newer releases back",
    "signature": "not signed by those who may",
    "rollback": "older than what this device saw before",
    "mix_and_match": "parts of different states of the repository",
    "tampered": "the bytes are not those that were signed",
    "endless": "more bytes came than were announced",
    "missing": "a file is not there",
    "malformed": "not understood",
}
