"""What commands print: whole words and ids in a pipe and on a narrow terminal, and nothing that turns into an emoji."""

from __future__ import annotations

import re

import pytest

from coordinator.commands.output import make_table, plain_console, print_output

IDS = [f"{number:032x}" for number in (11, 12)]
COLUMNS = ("id", "name", "group", "state", "runtimes")


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)


def print_devices() -> None:
    table = make_table(*COLUMNS)
    for each in IDS:
        table.add_row(
            each, "a name of several words", "hospitals-of-the-north", "active", "litert, tensorflow"
        )
    print_output(table)


def test_a_wide_table_in_a_pipe_has_one_line_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_devices()
    heading, *lines = printed(capsys).splitlines()
    assert heading.split() == list(COLUMNS)
    assert [line.split()[0] for line in lines] == IDS
    assert all(line.rstrip().endswith("litert, tensorflow") for line in lines)


@pytest.mark.parametrize("columns", [20, 60, 100])
def test_a_wide_table_on_a_narrow_terminal_loses_no_character(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    print_devices()
    whole = sorted(printed(capsys).replace("\n", "").replace(" ", ""))
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    print_devices()
    text = printed(capsys)
    assert sorted(text.replace("\n", "").replace(" ", "")) == whole
    assert "…" not in text


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plain_console().print("net:fire:build [bold]x[/] :warning:", soft_wrap=True)
    assert printed(capsys) == "net:fire:build [bold]x[/] :warning:\n"
