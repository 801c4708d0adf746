"""What a killed worker costs: seconds from SIGKILL to the next step, and goodput at one kill every two minutes.

Two processes train under a launcher; one of them is killed several times, and each time all start again from the
last checkpoint. Measured of every kill: seconds until a step is reported again (R), and steps done twice, times the
median seconds of a step (L). Goodput is the share of the time that goes into steps that last:

    measured    steps · seconds of a step / (last report - first report), at the kills of this run
    at 120 s    1 - (R + L) / 120, medians; a step's seconds include what checkpoints cost
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.pretraining import Agent, change, kill, training, write_job

KILLS, STEPS, EVERY = 4, 600, 20
KILL_INTERVAL_SECONDS = 120
AIM_SECONDS, AIM_GOODPUT = 10.0, 0.85


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        job = write_job(Path(folder) / "job", STEPS, every=EVERY)
        model = {"name": "gpt", "input_shape": [16], "classes": 51, "input_dtype": "int32"}
        change(
            job,
            model={**model, "task": "next_token", "options": {"width": 128, "layers": 4, "heads": 4}},
            options={"steps": STEPS, "batch_size": 44, "lr": 3e-3},
        )
        with training(job, 2) as agent:
            measured = _killed(agent)
    seconds = statistics.median(measured["recovery_seconds"])
    redone = statistics.median(measured["redone_seconds"])
    goodput = 1 - (seconds + redone) / KILL_INTERVAL_SECONDS
    print(
        f"recovery: {seconds:.1f} s from SIGKILL to the next step "
        f"({', '.join(f'{value:.1f}' for value in measured['recovery_seconds'])}), aim {AIM_SECONDS:.0f} s"
    )
    print(
        f"recovery: goodput {goodput:.1%} at a kill every {KILL_INTERVAL_SECONDS} s, aim {AIM_GOODPUT:.0%}; "
        f"{measured['goodput']:.1%} at the {KILLS} kills of this run"
    )
    return {**measured, "goodput_at_120_s": goodput, "aim_seconds": AIM_SECONDS, "aim_goodput": AIM_GOODPUT}


def _killed(agent: Agent) -> dict[str, Any]:
    agent.reaches(1)
    began = time.perf_counter()
    recoveries, redone = [], []
    for number in range(KILLS):
        agent.reaches((number + 1) * STEPS // (KILLS + 1))
        heard = len(agent.lines)
        at = max(line["step"] for line in agent.lines if "loss" in line)
        kill(agent.workers[number % 2])
        killed = time.perf_counter()
        agent.waits_for(lambda line: line.get("status") == "restarting", heard)
        begins = agent.waits_for(lambda line: "step" in line and "loss" not in line, heard)
        agent.waits_for(lambda line: "loss" in line, agent.lines.index(begins, heard))
        recoveries.append(time.perf_counter() - killed)
        redone.append(max(0, at - begins["step"]))
    agent.reaches(STEPS)
    wall = time.perf_counter() - began
    every = STEPS // 200
    step = statistics.median(line["seconds"] / every for line in agent.lines if "loss" in line)
    return {
        "recovery_seconds": recoveries,
        "redone_seconds": [steps * step for steps in redone],
        "step_seconds": step,
        "goodput": STEPS * step / wall,
    }
