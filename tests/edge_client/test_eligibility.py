"""When a device may train: each condition by itself, in words, and nothing that was not asked for."""

from __future__ import annotations

from collections import namedtuple
from datetime import datetime, time
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_client.eligibility import Conditions, Readings, ineligible, is_metered, read_now
from edge_client.errors import UserError

BAD = Readings(
    on_ac_power=False,
    battery_percent=12.0,
    load=3.5,
    temperature_celsius=91.0,
    free_disk_bytes=1_000_000,
    metered=True,
    local_time=time(23, 30),
)
GOOD = Readings(True, 80.0, 0.1, 40.0, 10**10, False, time(12, 0))


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (Conditions(on_ac_power=True), "on battery (12 %), conditions.on_ac_power is set"),
        (Conditions(min_battery_percent=50), "battery at 12 %, conditions.min_battery_percent is 50"),
        (Conditions(max_load=2), "load 3.50 per core, conditions.max_load is 2"),
        (Conditions(max_temperature_celsius=80), "91 °C, conditions.max_temperature_celsius is 80"),
        (
            Conditions(min_free_disk_bytes=10**9),
            "1 MB of disk free, conditions.min_free_disk_bytes asks for 1000 MB",
        ),
        (Conditions(unmetered_network=True), "on a metered network, conditions.unmetered_network is set"),
        (Conditions(quiet_hours=("22:00-06:30",)), "quiet hours 22:00-06:30, it is 23:30"),
    ],
)
def test_each_condition_says_why_in_words(conditions: Conditions, message: str) -> None:
    assert ineligible(conditions, BAD) == (message,)
    assert ineligible(conditions, GOOD) == ()


def test_all_reasons_are_reported_at_once() -> None:
    assert len(ineligible(Conditions(on_ac_power=True, max_load=1, quiet_hours=("23:00-24:00",)), BAD)) == 3


def test_without_conditions_everything_goes() -> None:
    assert ineligible(Conditions(), BAD) == ()


def test_unavailable_readings_do_not_stop_it_but_an_unknown_network_does() -> None:
    requested = Conditions(True, 50, 1, 50, 10, False, ())

    assert ineligible(requested, Readings()) == ()
    (words,) = ineligible(Conditions(unmetered_network=True), Readings())
    assert "whether the network is metered is not known" in words
    assert "write `no` into the file `metered`" in words


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("09:00-17:00", ["09:00", "16:59"], ["08:59", "17:00", "00:00"]),
        ("22:00-06:30", ["22:00", "23:59", "00:00", "06:29"], ["06:30", "12:00", "21:59"]),
        ("18:00-24:00", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("00:00-06:00", ["00:00", "05:59"], ["06:00", "23:59"]),
    ],
)
def test_quiet_hours_begin_with_their_start_and_may_go_over_midnight(
    hours: str, inside: list[str], outside: list[str]
) -> None:
    conditions = Conditions(quiet_hours=(hours,))

    for text in inside:
        assert ineligible(conditions, Readings(local_time=time.fromisoformat(text)))
    for text in outside:
        assert not ineligible(conditions, Readings(local_time=time.fromisoformat(text)))


@pytest.mark.parametrize("text", ["22-6", "25:00-06:00", "night", "06:00-06:00", "22:00-06:60", ""])
def test_quiet_hours_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"conditions.quiet_hours has .*, expected local times such as"):
        Conditions(quiet_hours=(text,))


Battery = namedtuple("Battery", "percent power_plugged")


@pytest.mark.parametrize(
    ("battery", "on_ac_power", "percent"),
    [
        (None, True, None),
        (Battery(63.4, False), False, 63.4),
        (Battery(99, True), True, 99),
        (Battery(50, None), None, 50),
    ],
)
def test_power_is_read_from_the_battery_and_no_battery_is_ac(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    battery: Any,
    on_ac_power: bool | None,
    percent: float | None,
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)

    readings = read_now(Conditions(on_ac_power=True), tmp_path)

    assert (readings.on_ac_power, readings.battery_percent) == (on_ac_power, percent)


def test_the_hottest_sensor_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = namedtuple("entry", "current")
    found = {"cpu": [entry(50.0), entry(71.5)], "disk": [entry(40.0)]}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)

    assert read_now(Conditions(max_temperature_celsius=80), tmp_path).temperature_celsius == 71.5


def test_this_machine_is_read(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4)

    readings = read_now(Conditions(max_load=1, min_free_disk_bytes=1), tmp_path / "not" / "yet", now)

    assert readings.load is not None and readings.load >= 0
    assert readings.free_disk_bytes is not None and readings.free_disk_bytes > 0
    assert readings.local_time == time(3, 4)


def test_only_requested_parts_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: pytest.fail("read"), raising=False)
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: pytest.fail("read"), raising=False)

    assert read_now(Conditions(), tmp_path).free_disk_bytes is None


@pytest.mark.parametrize(("metered_state", "metered"), [("yes\n", True), ("No", False)])
def test_the_owners_file_says_whether_the_network_is_metered(
    tmp_path: Path, metered_state: str, metered: bool
) -> None:
    (tmp_path / "metered").write_text(metered_state)

    assert is_metered(tmp_path) is metered
