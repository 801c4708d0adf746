"""Records the wire: the bytes of one message of each kind, and of one result, for the wire version of this code.

    python -m tests.golden.wire.make

writes `tests/golden/wire/<version>/`. Run it when the version changes, or gains a key before any release has it, and only then:
the folders of older versions are what devices in the field send, and are never written again.

JSON is recorded in its canonical form (keys sorted, no spaces); the order of keys on the wire says nothing.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.wire import device as wire
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from edge_client.wire.quantities import QuantitySums
from edge_client.wire.scores import CALIBRATION_BINS, SCORE_BINS, ClassScores
from edge_client.wire.statistics import ColumnStatistics, StatisticsRequest, StatisticsResult
from strategies.update import Update

FOLDER = Path(__file__).parent
CURRENT = f"{wire.WIRE[0]}.{wire.WIRE[1]}"

DEVICE = "5b9f7c1e-3f3f-4a52-9f0c-0d6f2f8f6a01"
RUN = "0e0c1a52-7c1d-4e0b-8d63-5a0a3b6f2a02"
TASK = "c2c8a7de-64d0-4b8c-a4c1-7e2f1a9d3b03"
ROLLOUT = "9d1b8f0e-2c47-4d7e-8e55-6b3f0a7c9e04"
BASE = "4f" * 32
_PEM = "-----BEGIN {0}-----\nMA==\n-----END {0}-----\n"

KINDS: dict[str, type] = {
    "enrol": wire.EnrolRequest,
    "renew": wire.RenewRequest,
    "enrolled": wire.Enrolled,
    "checkin": wire.CheckIn,
    "checkin_answer": wire.CheckInAnswer,
    "checkin_answer_evaluate": wire.CheckInAnswer,
    "checkin_answer_statistics": wire.CheckInAnswer,
    "upload_start": wire.UploadStart,
    "upload_state": wire.UploadState,
    "evaluation": wire.EvaluationResult,
    "statistics": StatisticsResult,
    "decline": wire.Decline,
}
"""Message by the name of its file, without `.json`."""


def _scores() -> ClassScores:
    """Counts of 40 rows of three classes, 31 of them correct; no row is of the third."""
    inner, rest = (0,) * (SCORE_BINS - 2), (0,) * (CALIBRATION_BINS - 1)
    return ClassScores(
        confusion=((19, 5, 0), (4, 12, 0), (0, 0, 0)),
        positives=((5, *inner, 19), (4, *inner, 12), (0, *inner, 0)),
        negatives=((12, *inner, 4), (19, *inner, 5), (40, *inner, 0)),
        calibration_rows=(*rest, 40),
        calibration_correct=(*rest, 31),
        calibration_sums=(*map(float, rest), 39.5),
        squared_sum=17.5,
    )


def messages() -> dict[str, Any]:
    """One message of each kind, as this version has it, with every key set to something."""
    train = _offer("train", task_message().to_json())
    return {
        "enrol": wire.EnrolRequest("fl1.ab.cd", _PEM.format("CERTIFICATE REQUEST"), "meter 7", "SN-7"),
        "renew": wire.RenewRequest(_PEM.format("CERTIFICATE"), _PEM.format("CERTIFICATE REQUEST"), "c2ln"),
        "enrolled": wire.Enrolled(DEVICE, _PEM.format("CERTIFICATE"), "2026-07-01T00:00:00+00:00", 0.0),
        "checkin": wire.CheckIn(
            wire=CURRENT,
            software="0.3.0",
            runtimes={"litert": "2.1", "torch": "2.9"},
            memory_bytes=2**30,
            device_class="meter",
            labels={"site": "north"},
            datasets={"readings": 40},
            models=("logreg",),
            ineligible=(),
            opted_out=("another-run",),
            working_on=None,
            wait_seconds=0.0,
            releases=(
                wire.ReleaseReport(
                    ROLLOUT,
                    "digits",
                    4,
                    "rolled_back",
                    "crash_loop",
                    "it ended the daemon three times",
                    0.96875,
                    wire.ReleaseEvaluation(40, 31, 12.25, 30, 13.5),
                ),
            ),
            release_runtime="tflite-runtime",
        ),
        "checkin_answer": wire.CheckInAnswer(
            CURRENT,
            7.5,
            train,
            stop=False,
            hold=True,
            releases=(wire.ReleaseOffer(ROLLOUT, "digits", 3, "roll_back", force=True),),
        ),
        "checkin_answer_evaluate": wire.CheckInAnswer(CURRENT, 7.5, _offer("evaluate", {})),
        "checkin_answer_statistics": wire.CheckInAnswer(
            CURRENT, 7.5, _offer("statistics", json.loads(canonical(statistics_request())))
        ),
        "upload_start": wire.UploadStart(len(result()), "ab" * 32, len(result()), "identity"),
        "upload_state": wire.UploadState(100, accepted=False),
        "evaluation": wire.EvaluationResult(
            BASE, 40, 40, 31, 12.25, "north", QuantitySums(9.5, -1.25, 38.5), _scores()
        ),
        "statistics": StatisticsResult(
            40,
            10,
            {
                "age": ColumnStatistics("number", 38, 51.5, 812.25, 33.0, 70.5, (12, 26)),
                "seen": ColumnStatistics("number", 40, 19800.0, 200.0, date=True),
                "ward": ColumnStatistics("category", 40, categories={"icu": 25}, other=15),
            },
            {"0": 28},
            12,
            "north",
        ),
        "decline": wire.Decline("ineligible", "on battery"),
    }


def task_message() -> TaskMessage:
    return TaskMessage(3, DEVICE, BASE, 2**62, 8, 0.125, 2, None, {"name": "proximal", "mu": 0.25})


def statistics_request() -> StatisticsRequest:
    return StatisticsRequest(10, ("age", "ward"), {"age": (50.0,)}, "outcome", ("split",), quantity=True)


def result() -> bytes:
    """A result of a model of two tensors."""
    delta = {
        "fc.bias": np.array([0.5, -0.25, 0.0], np.float32),
        "fc.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    }
    return encode_result(task_message(), Update(delta, 40, 10, 0.75))


def canonical(message: Any) -> bytes:
    """The recorded form of a message."""
    document = wire.to_json(message) if hasattr(message, "__dataclass_fields__") else message
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _offer(kind: wire.TaskKind, message: dict[str, Any]) -> wire.TaskOffer:
    return wire.TaskOffer(
        task=TASK,
        kind=kind,
        run=RUN,
        run_name="golden",
        round=3,
        runtime="litert",
        dataset="readings",
        message=message,
        model=wire.ModelRef("logreg", {"hidden": []}, (4,), 3, "float32", "classification"),
        params=wire.BlobRef(BASE, 1000) if kind != "statistics" else None,
        streams=wire.BlobRef("5a" * 32, 2000) if kind == "train" else None,
        artifact=wire.BlobRef("6b" * 32, 3000) if kind != "statistics" else None,
        manifest=wire.BlobRef("7c" * 32, 4000) if kind != "statistics" else None,
        lease_seconds=120.0,
        deadline_seconds=600.0,
        result_limit_bytes=70_000,
        schema=wire.BlobRef("8d" * 32, 5000),
    )


def main() -> None:
    folder = FOLDER / CURRENT
    folder.mkdir(exist_ok=True)
    for name, message in messages().items():
        (folder / f"{name}.json").write_bytes(canonical(message))
    (folder / "result.safetensors").write_bytes(result())
    (folder / "result.deflate").write_bytes(zlib.compress(result()))
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
