"""`fedloop pretrain tokenize`: texts into a folder of token files (`models.datasets.token_files`).

The files are written into a folder beside, which is renamed when it is complete. One that a killed process left is not taken for token
files, and the next attempt replaces it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.datacenter import jobs
from coordinator.datacenter.jobs import DatacenterJob, Environment
from coordinator.datacenter.training_data import as_user_errors
from coordinator.errors import UserError
from coordinator.output_folders import locked, require_new
from coordinator.storage.private_folders import private_folder
from edge_client.files import sync_folder


def tokenize(request: Mapping[str, Any], out: Path, environment: Environment) -> dict[str, Any]:
    """Tokenises into the new or empty folder `out`, and returns the header of the token files.

    `request` holds keys of `models.datasets.token_files.tokenize_process.Request` but the folder.

    Raises:
        UserError: the request or a text is wrong, or `out` is not empty.
    """
    require_new(out)
    out = out.absolute()
    environment.progress.stage(f"tokenising into {out.name}")
    with _beside(out) as folder, private_folder() as scratch:
        table = {**request, "folder": str(folder)}
        job = DatacenterJob("tokenize", {}, {}, more={"tokenize": table})
        with as_user_errors():
            header = jobs.run(job, scratch, environment.progress.trained, environment.clock)
        folder.rename(out)
        sync_folder(out.parent)
    return header


@contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty folder on the same disk as `out`, which no other process uses and which is removed unless it is renamed."""
    work = out.with_name(f".{out.name}.tokenizing")
    try:
        work.mkdir(parents=True, exist_ok=True)
        taken = UserError(f"--out {out}: another process is tokenising into it")
        with locked(work / ".lock", taken):
            folder = work / "tokens"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                yield folder
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
