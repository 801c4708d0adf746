"""Many devices upload at the same moment: so many are taken in, the others come back, and all of it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.arena import arena
from tests.support.long import LONG
from tests.support.upload_storm import CONTENT, storm

UPLOADS = 100 if LONG else 40
MAX_GROWTH_BYTES = 32_000_000


@pytest.mark.slow
@pytest.mark.long
def test_many_uploads_at_once_take_turns(tmp_path: Path, served_on: Mapping[str, str]) -> None:
    with arena(tmp_path, environment=served_on) as made:
        honest, *uploaders = made.enrol(UPLOADS + 1)
        found = storm(made, uploaders, honest, 1500.0, kept=True)
        assert found.accepted_bytes == UPLOADS * len(CONTENT), "all of it came in the end"
        assert set(found.codes) <= {"busy", "malformed", "no answer"}
        assert found.statuses[503] > 0
        assert found.retry_after == {"2"}
        assert found.growth_bytes < MAX_GROWTH_BYTES, "where all are taken in at once it is 2.2 MB for each"
        assert len(found.honest) > 0, "an honest device was served meanwhile"
        assert not [line for line in made.failures() if '"status": 503' not in line]
