"""What a person gave on the command line: the configuration, the state folder, a yes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from edge_client.config import EdgeConfig, Loaded, load
from edge_client.errors import UserMistake
from edge_client.state import State, daemon_pid, lock

AsJson = Annotated[bool, typer.Option("--json", help="For a script to read.")]
Sure = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def loaded(context: typer.Context) -> Loaded:
    """The configuration, and where each value came from."""
    file, flags = context.obj
    return load(file, os.environ, flags)


def configuration(context: typer.Context) -> EdgeConfig:
    """The configuration that holds."""
    return loaded(context).config


@contextmanager
def alone(state_dir: Path) -> Iterator[None]:
    """Holds the state folder, so that no daemon works in it meanwhile."""
    file = lock(state_dir)
    if file is None:
        raise UserMistake(
            f"a daemon (process {daemon_pid(state_dir)}) works in {state_dir}; end it first, or give another --state-dir"
        )
    try:
        yield
    finally:
        file.close()


@contextmanager
def opened(config: EdgeConfig) -> Iterator[State]:
    """What the daemon remembers, open meanwhile."""
    state = State(config.state_dir)
    try:
        yield state
    finally:
        state.close()


def confirm(sure: bool, question: str) -> None:
    """Goes on only after a yes; `sure`: it was given with the command."""
    if sure:
        return
    if not sys.stdin.isatty():
        raise UserMistake("this asks for confirmation and there is nobody to ask; give --yes")
    typer.confirm(question, abort=True)


def wake(config: EdgeConfig) -> None:
    """Has a running daemon look at once."""
    pid = daemon_pid(config.state_dir)
    if pid is not None:
        # It may be ending, or be another user's; it looks by itself within a minute.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
