"""The pinned libraries install on the machine that the README names: Debian 12, whose Python is 3.11.2."""

from __future__ import annotations

from importlib.metadata import distributions

from packaging.specifiers import SpecifierSet

DEBIAN_12 = "3.11.2"


def test_every_installed_library_takes_the_python_of_debian_12() -> None:
    metadata = [each.metadata for each in distributions()]
    # Libraries that say nothing are left out first: once importlib_metadata is imported, a missing entry is an error.
    asked = {each["Name"]: each["Requires-Python"] for each in metadata if "Requires-Python" in each}
    assert len(asked) > 100
    assert {name: wanted for name, wanted in asked.items() if DEBIAN_12 not in SpecifierSet(wanted)} == {}
