"""Shared options of commands: the configuration, the state folder, confirmation."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from edge_client.config import EdgeConfig, LoadedConfig, load
from edge_client.errors import UserError
from edge_client.state import daemon_pid, lock

AsJson = Annotated[bool, typer.Option("--json", help="For a script to read.")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def load_config(context: typer.Context) -> LoadedConfig:
    """The configuration, and where each value came from."""
    file, flags = context.obj
    return load(file, os.environ, flags)


def configuration(context: typer.Context) -> EdgeConfig:
    """The effective configuration."""
    return load_config(context).config


@contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Locks the state folder, so that no daemon uses it meanwhile."""
    file = lock(state_dir)
    if file is None:
        raise UserError(
            f"a daemon (process {daemon_pid(state_dir)}) uses {state_dir}; stop it first, or choose another --state-dir"
        )
    try:
        yield
    finally:
        file.close()


def confirm(sure: bool, question: str) -> None:
    """Returns only after a yes; `sure`: the command line confirmed."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise UserError("this needs confirmation and standard input is not a terminal; pass --yes")
    typer.confirm(question, abort=True)


def wake(config: EdgeConfig) -> None:
    """Wakes a running daemon."""
    pid = daemon_pid(config.state_dir)
    if pid is not None:
        # It may be ending, or belong to another user; it notices within a minute anyway.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
