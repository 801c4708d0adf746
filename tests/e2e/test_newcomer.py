"""`fedloop demo-fleet --serve`: who opens its console sees a round within a minute."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from coordinator.accounts.admin_token import read_admin_token
from tests.support.browser import find_browser, running
from tests.support.cli import started

pytestmark = [pytest.mark.slow, pytest.mark.extended]


def test_a_newcomer_sees_a_live_round_within_a_minute(tmp_path: Path) -> None:
    find_browser()
    output = tmp_path / "output"
    with started("demo-fleet", "--serve", "--out", "demo", cwd=tmp_path, output=output) as demo:
        assert demo.reaches(lambda: "Ctrl-C stops" in output.read_text()), demo.errors()
        home = tmp_path / "demo" / "coordinator"
        url = json.loads((home / "serve.json").read_bytes())["operator"]
        with running("newcomer.mjs", {"url": url, "token": read_admin_token(home)}) as page:
            document, _ = page.communicate()
        assert page.returncode == 0
        assert json.loads(document) == {"step": "saw a live round"}
        demo.send(signal.SIGINT)
        assert demo.ended() == 0
        assert demo.all_gone()
