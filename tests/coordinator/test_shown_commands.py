"""Commands that the console shows are commands of the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import typer

from coordinator.commands.cli import app

WEB = Path(__file__).parents[2] / "web" / "src"
_COMMAND = re.compile(r"fedloop(?: [a-zA-Z@:./_-]+)+")


def test_every_command_that_the_console_shows_exists_with_its_options() -> None:
    texts = [path.read_text("utf-8") for path in WEB.rglob("*") if path.suffix in (".svelte", ".ts")]
    shown = {
        command
        for text in texts
        for command in _COMMAND.findall(re.sub(r"\$\{[^}]*\}", "X", text))
        if command.split()[1].islower()
    }
    assert len(shown) >= 10
    for line in sorted(shown):
        _require_exists(line)


def _require_exists(line: str) -> None:
    command: click.Command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and isinstance(command, click.Group):
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    options = {"--help"} | {name for each in command.params for name in each.opts}
    assert {word for word in words if word.startswith("--")} <= options, line
