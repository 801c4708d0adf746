"""Decides whether this device may train, from the owner's conditions and the machine's readings.

`read_now` reads the machine, and only what a condition needs; `ineligible` decides from the readings alone. What can
be read differs between machines:

- *power* from the kernel's battery (`/sys/class/power_supply`). A machine without a battery counts as on AC power.
- *load* is the one-minute load average divided by the cores this process may use.
- *temperature* is the hottest sensor of the kernel's hwmon and thermal zones. Without a sensor, as in most virtual
  machines, the condition holds.
- *metered network* from the file `metered` in the state folder (`yes` or `no`, for the owner's scripts), else
  from NetworkManager over D-Bus. If neither knows, the condition does not hold, and the message says what to do.
- *quiet hours* by this machine's local time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path

import psutil

from edge_client.errors import UserError

METERED_FILE = "metered"

_BUSCTL_SECONDS = 2.0


@dataclass(frozen=True)
class Conditions:
    """Conditions under which the device may train; unset ones are ignored.

    Attributes:
        on_ac_power: only while on AC power.
        min_battery_percent: only with at least this charge, if there is a battery.
        max_load: only below this one-minute load average per core.
        max_temperature_celsius: only below this temperature of the hottest sensor.
        min_free_disk_bytes: only with so much free on the disk of the state folder.
        unmetered_network: only if the network is known to be unmetered.
        quiet_hours: never within these local times, such as "22:00-06:30".

    Raises:
        UserError: quiet hours are not in that form.
    """

    on_ac_power: bool = False
    min_battery_percent: float | None = None
    max_load: float | None = None
    max_temperature_celsius: float | None = None
    min_free_disk_bytes: int | None = None
    unmetered_network: bool = False
    quiet_hours: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for text in self.quiet_hours:
            _hours(text)


@dataclass(frozen=True)
class Readings:
    """The machine's readings; None if unknown or not needed.

    Only an unknown metered network is a reason to wait: waiting costs less there than being wrong.

    Attributes:
        on_ac_power: also True without a battery.
        load: one-minute average per core.
    """

    on_ac_power: bool | None = None
    battery_percent: float | None = None
    load: float | None = None
    temperature_celsius: float | None = None
    free_disk_bytes: int | None = None
    metered: bool | None = None
    local_time: time | None = None


def ineligible(conditions: Conditions, readings: Readings) -> tuple[str, ...]:
    """Reasons why the device may not train now; empty: it may."""
    return tuple(_reasons(conditions, readings))


def read_now(conditions: Conditions, state_dir: Path, now: datetime | None = None) -> Readings:
    """Readings for the conditions that are set. `now`: local time; default: the clock's."""
    needs_battery = conditions.on_ac_power or conditions.min_battery_percent is not None
    battery = psutil.sensors_battery() if needs_battery else None
    cores = max(1, len(os.sched_getaffinity(0)))
    return Readings(
        on_ac_power=battery.power_plugged if battery is not None else True,
        battery_percent=float(battery.percent) if battery is not None else None,
        load=os.getloadavg()[0] / cores if conditions.max_load is not None else None,
        temperature_celsius=_hottest() if conditions.max_temperature_celsius is not None else None,
        free_disk_bytes=_free(state_dir) if conditions.min_free_disk_bytes is not None else None,
        metered=is_metered(state_dir) if conditions.unmetered_network else None,
        local_time=(now or datetime.now()).time(),
    )


def is_metered(state_dir: Path) -> bool | None:
    """Whether the network is metered, by the owner's file or NetworkManager; None if neither knows."""
    with suppress(OSError, UnicodeDecodeError):
        text = (state_dir / METERED_FILE).read_text("utf-8").strip().lower()
        if text in ("yes", "no"):
            return text == "yes"
    return _network_manager_metered()


def _reasons(conditions: Conditions, readings: Readings) -> Iterator[str]:
    charge, least = readings.battery_percent, conditions.min_battery_percent
    if conditions.on_ac_power and readings.on_ac_power is False:
        known = f" ({charge:.0f} %)" if charge is not None else ""
        yield f"on battery{known}, conditions.on_ac_power is set"
    if least is not None and charge is not None and charge < least:
        yield f"battery at {charge:.0f} %, conditions.min_battery_percent is {least:g}"
    load, most = readings.load, conditions.max_load
    if most is not None and load is not None and load >= most:
        yield f"load {load:.2f} per core, conditions.max_load is {most:g}"
    hottest, most = readings.temperature_celsius, conditions.max_temperature_celsius
    if most is not None and hottest is not None and hottest >= most:
        yield f"{hottest:.0f} °C, conditions.max_temperature_celsius is {most:g}"
    free, least = readings.free_disk_bytes, conditions.min_free_disk_bytes
    if least is not None and free is not None and free < least:
        yield f"{free / 1e6:.0f} MB of disk free, conditions.min_free_disk_bytes asks for {least / 1e6:.0f} MB"
    if conditions.unmetered_network and readings.metered:
        yield "on a metered network, conditions.unmetered_network is set"
    if conditions.unmetered_network and readings.metered is None:
        yield (
            "whether the network is metered is not known, conditions.unmetered_network is set: NetworkManager does not "
            f"say; write `no` into the file `{METERED_FILE}` in the state folder, or leave the condition out"
        )
    now = readings.local_time
    if now is not None:
        quiet = [text for text in conditions.quiet_hours if _within(now, *_hours(text))]
        yield from (f"quiet hours {text}, it is {now:%H:%M}" for text in quiet[:1])


def _within(now: time, start: time, end: time) -> bool:
    """`start` is included, `end` is not; a range that ends before it starts spans midnight."""
    if start < end:
        return start <= now < end
    return now >= start or now < end


def _hours(text: str) -> tuple[time, time]:
    match = re.fullmatch(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})", text.strip())
    with suppress(ValueError):
        if match is not None:
            hour, minute, end_hour, end_minute = (int(part) for part in match.groups())
            start, end = time(hour, minute), time(end_hour % 24 if end_minute == 0 else end_hour, end_minute)
            if start != end:
                return start, end
    raise UserError(f"conditions.quiet_hours has {text!r}, expected local times such as '22:00-06:30'")


def _hottest() -> float | None:
    temperatures = [entry.current for entries in psutil.sensors_temperatures().values() for entry in entries]
    return max(temperatures, default=None)


def _free(folder: Path) -> int:
    """Free bytes for this user on the disk of `folder`, or of its first parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _network_manager_metered() -> bool | None:
    """NetworkManager's `Metered`: 1 and 3 (guessed) yes, 2 and 4 (guessed) no, 0 unknown."""
    busctl = shutil.which("busctl")
    if busctl is None or not Path("/run/dbus/system_bus_socket").exists():
        return None
    name = "org.freedesktop.NetworkManager"
    command = [busctl, "--system", "--json=short", "--auto-start=no", "get-property"]
    command += [name, "/org/freedesktop/NetworkManager", name, "Metered"]
    with suppress(OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        done = subprocess.run(command, capture_output=True, timeout=_BUSCTL_SECONDS, check=True)
        return {1: True, 3: True, 2: False, 4: False}.get(json.loads(done.stdout)["data"])
    return None
