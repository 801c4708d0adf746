"""The example of docs/generation.md runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "generation.md"


@pytest.mark.slow
def test_the_example_generates(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]

    exec(compile(example, str(PAGE), "exec"), {})

    printed = capsys.readouterr().out
    assert printed.startswith("a ")
    assert re.search(r"(stop|length)\n$", printed)
