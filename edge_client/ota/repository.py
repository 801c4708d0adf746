"""The signed repository of releases: TUF's client over the pinned connection.

    root       the first is pinned, from the configuration or at first contact; it must sign later ones
    refresh    root ─► timestamp ─► snapshot ─► targets, each checked by `tuf.ngclient` (TUF specification 1.0.33, section 5)
    rollouts   which devices run which version, signed by a delegated role: an offer alone is only a hint
    targets    length, SHA-256 and blocks of a release's files

The connection is authenticated, but that does not make a release trusted. An attacker who holds the coordinator, its
certificates and its online keys still cannot make a device run a file that the offline keys did not sign.

Expiry is checked against this machine's clock.
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

from edge_client.files import make_folder, sync_file, sync_folder, write_durably
from edge_client.ota.errors import Postponed
from edge_client.transport.failures import ServerRefused
from edge_client.transport.link import Link
from edge_client.wire import rollouts
from edge_client.wire.rollouts import REPOSITORY_PATH, Rollout
from edge_client.wire.strict import InvalidDocument, printable

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

    from edge_client.wire.device import ReleaseOffer

FOLDER = "_tuf"
"""Next to the models' folders, none of which can have this name."""

_PINNED = "pinned.root.json"
_NOT_FOUND = 404


class Repository:
    """The current repository; call `refresh` first. `folder` keeps the trusted metadata, to detect rollbacks."""

    def __init__(
        self,
        folder: Path,
        link: Link,
        *,
        root: Path | None = None,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> None:
        """`root`: a file with the first root; None: the pinned one, or the one that the coordinator sends at first contact."""
        self._folder = folder
        self._link = link
        self._root = root
        self._fetcher = _LinkFetcher(link, check_cancelled)
        self._updater: Updater | None = None

    def refresh(self) -> None:
        """Fetches and verifies root, timestamp, snapshot and targets.

        Raises:
            Postponed: `expired`, `rollback`, `signature`, `mix_and_match`, `endless`, `missing` and others; `root`: the
                configured one cannot be read.
            OSError: the disk.
        """
        pinned = self._folder / _PINNED
        if self._root is None and not pinned.exists():
            # Metadata verified by a root that was never pinned is worthless.
            shutil.rmtree(self._folder, ignore_errors=True)
        make_folder(self._folder)
        first = self._first_root(pinned)
        with self._translated_errors():
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

    def signed_rollout(self, offer: ReleaseOffer, device: str) -> Rollout | None:
        """The signed rollout behind an offer for this device; None: there is none."""
        target = self.target(rollouts.rollouts_path(offer.model))
        if target is None:
            return None
        if target.length > rollouts.LARGEST_DOCUMENT_BYTES:
            raise Postponed("endless", f"{target.path} is {target.length} bytes long")
        path = self._folder / ".rollouts"  # no role's metadata has this name
        with self._translated_errors():
            assert self._updater is not None
            self._updater.download_target(target, str(path))
        try:
            signed = rollouts.from_json(path.read_bytes(), offer.model)
        except InvalidDocument as error:
            raise Postponed("malformed", printable(str(error))) from None
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
        """The signed description of one file; None: no such file is signed."""
        assert self._updater is not None
        with self._translated_errors():
            return self._updater.get_targetinfo(path)

    def _first_root(self, pinned: Path) -> bytes:
        if self._root is not None:
            try:
                return self._root.read_bytes()
            except OSError as error:
                raise Postponed(
                    "root",
                    f"releases.root = {self._root} cannot be read: {error.strerror}; expected the first root",
                ) from None
        if pinned.exists():
            return pinned.read_bytes()
        try:
            return self._link.content(f"{REPOSITORY_PATH}/root")
        except ServerRefused as refused:
            if refused.status != _NOT_FOUND:
                raise
            raise Postponed("missing", f"the coordinator has no releases: {refused.message}") from None

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raises tuf's errors as Postponed, with a code."""
        try:
            yield
        except (exceptions.RepositoryError, exceptions.DownloadError) as error:
            code = _code(error, self._fetcher.last)
            raise Postponed(code, printable(f"{_DESCRIPTIONS[code]}: {error}")) from None

    def _make_durable(self) -> None:
        """Makes the trusted metadata durable: it protects against older metadata, after a power cut too."""
        for path in (*self._folder.glob("*.json"), *(self._folder / "root_history").glob("*.json")):
            sync_file(path)
        sync_folder(self._folder)
        for leftover in self._folder.glob("tmp*"):
            leftover.unlink(missing_ok=True)  # of a write that a power cut interrupted


class _LinkFetcher(FetcherInterface):
    """Fetches over the pinned connection. The caller limits how much of a file is read."""

    def __init__(self, link: Link, check_cancelled: Callable[[], None]) -> None:
        self._link = link
        self._check_cancelled = check_cancelled
        self.last = ""

    def _fetch(self, url: str) -> Iterator[bytes]:
        self.last = url
        try:
            with self._link.stream(f"{REPOSITORY_PATH}/{url}") as stream:
                for chunk in stream.chunks:
                    self._check_cancelled()
                    yield chunk
        except ServerRefused as refused:
            # Only a 404 says that there is no such file; a 403, for example, is about this device.
            if refused.status != _NOT_FOUND:
                raise
            raise exceptions.DownloadHTTPError(f"there is no {url}", refused.status) from None


def _code(error: Exception, last: str) -> str:
    """The code of a tuf error. `last`: the file fetched last."""
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


_DESCRIPTIONS = {
    "expired": "the metadata is out of date, as if somebody held newer releases back",
    "signature": "not signed by an authorized key",
    "rollback": "older than what this device saw before",
    "mix_and_match": "parts of different states of the repository",
    "tampered": "the bytes are not those that were signed",
    "endless": "more bytes than announced",
    "missing": "a file is not there",
    "malformed": "cannot be parsed",
}
