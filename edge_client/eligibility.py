"""When this device may train: what its owner's conditions are, what the machine says, and why not, in words.

`read_now` looks at the machine, `ineligible` decides, without looking at anything else. Only what a condition
asks for is read. What can be known differs from machine to machine:

- *power* from the kernel's battery (`/sys/class/power_supply`). A machine without a battery counts as on AC power.
- *load* is the one-minute load average divided by the cores this process may use.
- *temperature* is the hottest sensor of the kernel's hwmon and thermal zones. Where there is none, as in most
  virtual machines, nothing is measured and the condition holds.
- *metered network* from the file `metered` in the state folder (`yes` or `no`, for a script of the owner's), else
  from NetworkManager over D-Bus. Where neither knows, the condition does not hold, and the words say what to do.
- *quiet hours* by this machine's local time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, time
from pathlib import Path

import psutil

from edge_client.errors import UserMistake

METERED_FILE = "metered"

_BUSCTL_SECONDS = 2.0


@dataclass(frozen=True)
class Conditions:
    """Under which the device may train; whatever is not set does not matter.

    Attributes:
        on_ac_power: only while on AC power.
        min_battery_percent: only with at least this charge, where there is a battery.
        max_load: only below this one-minute load average per core.
        max_temperature_celsius: only below this temperature of the hottest sensor.
        min_free_disk_bytes: only with this much free where the state is kept.
        unmetered_network: only where the network is known not to be metered.
        quiet_hours: never within these local times, such as "22:00-06:30".

    Raises:
        UserMistake: quiet hours are not of that form.
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
    """What the machine says; None where it cannot be known or was not asked for.

    Only of a metered network is not knowing a reason to wait: there waiting costs less than being wrong.

    Attributes:
        on_ac_power: True as well where there is no battery.
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
    """Why the device may not train now, one sentence part a reason; empty: it may."""
    found = (
        _power(conditions, readings),
        _charge(conditions, readings),
        _load(conditions, readings),
        _temperature(conditions, readings),
        _disk(conditions, readings),
        _network(conditions, readings),
        _quiet(conditions, readings),
    )
    return tuple(words for words in found if words is not None)


def read_now(conditions: Conditions, state_dir: Path, now: datetime | None = None) -> Readings:
    """What the machine says about the conditions that are set. `now`: local time, the clock's unless given."""
    battery = psutil.sensors_battery() if _asks_for_battery(conditions) else None
    return Readings(
        on_ac_power=battery.power_plugged if battery is not None else True,
        battery_percent=float(battery.percent) if battery is not None else None,
        load=os.getloadavg()[0] / _cores() if conditions.max_load is not None else None,
        temperature_celsius=_hottest() if conditions.max_temperature_celsius is not None else None,
        free_disk_bytes=_free(state_dir) if conditions.min_free_disk_bytes is not None else None,
        metered=is_metered(state_dir) if conditions.unmetered_network else None,
        local_time=(now or datetime.now()).time(),
    )


def is_metered(state_dir: Path) -> bool | None:
    """Whether traffic costs, by the owner's file or NetworkManager; None where neither knows."""
    with suppress(OSError, UnicodeDecodeError):
        said = (state_dir / METERED_FILE).read_text("utf-8").strip().lower()
        if said in ("yes", "no"):
            return said == "yes"
    return _network_manager_says()


def _power(conditions: Conditions, readings: Readings) -> str | None:
    if not conditions.on_ac_power or readings.on_ac_power in (True, None):
        return None
    charge = f" ({readings.battery_percent:.0f} %)" if readings.battery_percent is not None else ""
    return f"on battery{charge}, conditions.on_ac_power is set"


def _charge(conditions: Conditions, readings: Readings) -> str | None:
    least, charge = conditions.min_battery_percent, readings.battery_percent
    if least is None or charge is None or charge >= least:
        return None
    return f"battery at {charge:.0f} %, conditions.min_battery_percent is {least:g}"


def _load(conditions: Conditions, readings: Readings) -> str | None:
    most, load = conditions.max_load, readings.load
    if most is None or load is None or load < most:
        return None
    return f"load {load:.2f} per core, conditions.max_load is {most:g}"


def _temperature(conditions: Conditions, readings: Readings) -> str | None:
    most, hottest = conditions.max_temperature_celsius, readings.temperature_celsius
    if most is None or hottest is None or hottest < most:
        return None
    return f"{hottest:.0f} °C, conditions.max_temperature_celsius is {most:g}"


def _disk(conditions: Conditions, readings: Readings) -> str | None:
    least, free = conditions.min_free_disk_bytes, readings.free_disk_bytes
    if least is None or free is None or free >= least:
        return None
    return f"{free / 1e6:.0f} MB of disk free, conditions.min_free_disk_bytes asks for {least / 1e6:.0f} MB"


def _network(conditions: Conditions, readings: Readings) -> str | None:
    if not conditions.unmetered_network or readings.metered is False:
        return None
    if readings.metered:
        return "on a metered network, conditions.unmetered_network is set"
    return (
        "whether the network is metered is not known, conditions.unmetered_network is set: NetworkManager does not "
        f"say; write `no` into the file `{METERED_FILE}` in the state folder, or leave the condition out"
    )


def _quiet(conditions: Conditions, readings: Readings) -> str | None:
    for text in conditions.quiet_hours:
        start, end = _hours(text)
        if readings.local_time is not None and _within(readings.local_time, start, end):
            return f"quiet hours {text}, it is {readings.local_time:%H:%M}"
    return None


def _within(now: time, start: time, end: time) -> bool:
    """`start` belongs to the range, `end` does not; a range that ends before it starts goes over midnight."""
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
    raise UserMistake(f"conditions.quiet_hours has {text!r}, expected local times such as '22:00-06:30'")


def _asks_for_battery(conditions: Conditions) -> bool:
    return conditions.on_ac_power or conditions.min_battery_percent is not None


def _cores() -> int:
    return max(1, len(os.sched_getaffinity(0)))


def _hottest() -> float | None:
    found = [entry.current for entries in psutil.sensors_temperatures().values() for entry in entries]
    return max(found, default=None)


def _free(folder: Path) -> int:
    """Free bytes for this user on the disk of `folder`, or of its first parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _network_manager_says() -> bool | None:
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
