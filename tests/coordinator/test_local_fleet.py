"""A fleet on this machine is waited for while it makes progress, however slow the machine is."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from coordinator.demos.local_fleet import StallDetector
from edge_client.processes.process import tie_to_parent


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_change_of_the_observed_value_is_progress() -> None:
    clock = Clock()
    stall = StallDetector(60, now=clock)
    for step in range(20):  # something else is seen every 50 seconds, for a quarter of an hour
        clock.seconds += 50
        assert not stall.is_stalled({"active": step}, [])
    clock.seconds += 60
    assert not stall.is_stalled({"active": 19}, [])
    clock.seconds += 1
    assert stall.is_stalled({"active": 19}, [])


@pytest.mark.slow
def test_a_process_that_computes_makes_progress_and_one_that_sleeps_does_not() -> None:
    for code, is_stalled in (("while True: pass", False), ("import time; time.sleep(600)", True)):
        clock = Clock()
        with subprocess.Popen(
            tie_to_parent([sys.executable, "-c", code]), stdout=subprocess.DEVNULL
        ) as process:
            try:
                stall = StallDetector(60, min_cpu_seconds=0.2, now=clock)
                stall.is_stalled("", [process.pid])
                if not is_stalled:
                    wait_for_processor_time(process.pid, 0.5)
                clock.seconds += 61
                stall.is_stalled("", [process.pid])  # starting took some
                if not is_stalled:
                    wait_for_processor_time(process.pid, 1.0)
                clock.seconds += 61
                assert stall.is_stalled("", [process.pid]) is is_stalled
            finally:
                process.kill()


def wait_for_processor_time(pid: int, seconds: float) -> None:
    import psutil

    while sum(psutil.Process(pid).cpu_times()[:2]) < seconds:
        time.sleep(0.01)
