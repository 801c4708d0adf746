"""The memory that a device reports: of the machine, or less where its container has less."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client import config
from edge_client.processes import memory

MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": f"{300 * MIB}\n"}, 300),
        ("0::/a/b\n", {"a/memory.max": str(200 * MIB), "a/b/memory.max": "max", "memory.max": "max"}, 200),
        ("0::/of/the/host\n", {"memory.max": str(64 * MIB)}, 64),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": str(100 * MIB)}, 100),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("0::/\n", {"memory.max": "many"}, None),
        ("0::/../../sub\n", {"memory.max": "max"}, None),
    ],
)
def test_the_least_limit_of_the_cgroups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, text in limits.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    machine = memory.total_bytes(tmp_path / "none", tmp_path / "fs")
    found = memory.total_bytes(tmp_path / "cgroup", tmp_path / "fs")
    assert found == (machine if expected is None else expected * MIB)


def test_a_device_reports_its_limit_or_what_there_is(tmp_path: Path) -> None:
    def reported(*sets: str) -> int:
        return config.load(
            None, {"HOME": str(tmp_path)}, [f"state_dir={tmp_path}", *sets]
        ).config.memory_bytes

    total = memory.total_bytes()
    assert reported() == total // 2
    assert reported("limits.memory_bytes=1000000") == 1_000_000
    assert reported("limits.memory_bytes=0") == reported(f"limits.memory_bytes={2 * total}") == total
