"""A TUF client as devices have one, over a repository's folder or over the device API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
from tuf.api.exceptions import DownloadHTTPError
from tuf.ngclient import Updater
from tuf.ngclient.fetcher import FetcherInterface

from tests.support.device_world import NO_TLS

_BLOCK_BYTES = 65536


class FolderFetcher(FetcherInterface):
    """Reads `…/metadata/…` and `…/targets/…` below a base from a folder, as a server of it would answer."""

    def __init__(self, folder: Path, base: str) -> None:
        self._folder = folder
        self._base = base

    def _fetch(self, url: str) -> Iterator[bytes]:
        path = self._folder / url.removeprefix(self._base)
        if not path.exists():
            raise DownloadHTTPError(f"{url} is not there", 404)
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block


class DeviceFetcher(FetcherInterface):
    """Asks a device API of `tests.support.device_world`. `received_bytes`: of all bodies so far."""

    def __init__(self, device: str) -> None:
        self._http = httpx.Client(headers={"x-device": device}, timeout=60, verify=NO_TLS)
        self.received_bytes = 0

    def close(self) -> None:
        self._http.close()

    def _fetch(self, url: str) -> Iterator[bytes]:
        with self._http.stream("GET", url) as answer:
            if answer.is_error:
                raise DownloadHTTPError(f"{url}: {answer.status_code}", answer.status_code)
            for block in answer.iter_bytes(_BLOCK_BYTES):
                self.received_bytes += len(block)
                yield block


def client(
    state: Path, repository: Path, bootstrap: bytes, *, url: str = "", fetcher: FetcherInterface | None = None
) -> Updater:
    """A client with its state in one folder, made as for one check of a device. `url`: of `/device/v1/releases`."""
    base = f"{url or 'http://repository'}/"
    (state / "metadata").mkdir(parents=True, exist_ok=True)
    (state / "targets").mkdir(exist_ok=True)
    return Updater(
        metadata_dir=str(state / "metadata"),
        metadata_base_url=f"{base}metadata/",
        target_dir=str(state / "targets"),
        target_base_url=f"{base}targets/",
        fetcher=fetcher or FolderFetcher(repository, base),
        bootstrap=bootstrap,
    )
