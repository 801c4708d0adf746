"""The training process does its jobs, keeps to its limits and never outlives who started it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_client.data import DataConfig, open_data
from edge_client.train.class_scores import class_scores
from edge_client.train.litert_trainer import LiteRTRuntime
from edge_client.train.process import Interrupted, Limits, TrainingFailed, TrainingJob, TrainingProcess
from edge_client.train.trainer import Trainer, TrainTask
from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import ModelRef, TaskMessage, to_json
from strategies.codes import known
from strategies.codes.code import decode
from strategies.params import Params, flatten, unflatten
from strategies.update import Update
from tests.support.artifacts import exported
from tests.support.training_jobs import MODEL, install_plug_in, job, message, naughty

pytestmark = pytest.mark.slow

LIMITS = Limits(memory_bytes=2_000_000_000, cpu_seconds=600, seconds=600)
PATIENT_SECONDS = 300


def go_on() -> str | None:
    return None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TrainingProcess]]:
    """Makes training processes with some limits; all are closed at the end."""
    started = []

    def begin(**limits: float) -> TrainingProcess:
        started.append(TrainingProcess(tmp_path / "log", replace(LIMITS, **limits)))
        return started[-1]

    yield begin
    for training in started:
        training.close()


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install_plug_in(tmp_path / "site")))


def here(work: TrainingJob) -> bytes:
    """The result of the same job in this process."""
    found, manifest = exported(MODEL)
    task = TaskMessage.from_json(work.message)
    params = arrays.decode(work.params.read_bytes())
    trainer = Trainer(LiteRTRuntime(found.tflite, manifest))
    local = trainer.train(params, TrainTask.of(task, {}), open_data(work.data).train())
    return encode_result(task, local.update)


def delta(result: bytes) -> Params:
    return unflatten(arrays.decode(result))["delta"]


def test_a_train_job_leaves_the_bytes_to_upload(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    work = job(tmp_path)

    done = start().run(work, go_on)

    assert work.result.read_bytes() == here(work)
    assert done.rows == len(open_data(work.data).train())
    assert not work.state_out.exists()  # plain SGD keeps nothing
    assert done.peak_memory_bytes < 100_000_000  # a daemon of 50 MB beside it stays below 150 MB


def test_the_next_job_is_done_by_the_same_process_and_comes_out_the_same(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    training, work = start(), job(tmp_path)
    training.run(work, go_on)
    fresh, first = work.result.read_bytes(), training.pid
    work.result.unlink()

    training.run(replace(work, kind="evaluate", message={}, result=tmp_path / "sums"), go_on)
    training.run(work, go_on)

    assert training.pid == first
    assert work.result.read_bytes() == fresh


def test_an_evaluate_job_leaves_sums_over_the_held_out_rows(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    work = job(tmp_path, kind="evaluate", message={})
    found, manifest = exported(MODEL)
    rows = open_data(work.data).held_out()
    expected = Trainer(LiteRTRuntime(found.tflite, manifest)).evaluate(
        arrays.decode(work.params.read_bytes()), rows, keep_logits=True
    )
    assert expected.logits is not None
    scores = class_scores(expected.logits, rows.y)
    assert scores is not None

    start().run(work, go_on)

    assert json.loads(work.result.read_bytes()) == {
        "rows": len(rows),
        "labels": len(rows),
        "correct": int(expected.correct.sum()),
        "loss_sum": expected.loss_sum,
        "scores": json.loads(json.dumps(to_json(scores))),
    }
    assert not work.state_out.exists()


def test_what_a_device_keeps_of_its_own_persists_and_is_scored_as_a_simulation_does(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    rule = {"name": "head_then_body", "local": ["fc.*"], "head_epochs": 1}
    work = job(tmp_path)
    work = replace(work, message={**work.message, "rule": rule})
    found, manifest = exported(MODEL)
    trainer, data = Trainer(LiteRTRuntime(found.tflite, manifest)), open_data(work.data)
    params, task = arrays.decode(work.params.read_bytes()), TaskMessage.from_json(work.message)
    training, kept = start(), dict[str, Params]()
    for number in range(2):
        training.run(work, go_on)
        local = trainer.train(params, TrainTask.of(task, {}), data.train(), kept)
        kept = local.client_state
        assert work.result.read_bytes() == encode_result(task, local.update)
        assert set(delta(work.result.read_bytes())) == set(trainer.runtime.trainable) - set(kept["local"])
        assert work.state_out.read_bytes() == arrays.encode(flatten(kept))
        work.result.unlink()
        state = work.state_out.rename(tmp_path / f"kept-{number}")
        work = replace(work, state_in=state)

    training.run(replace(work, kind="evaluate", message={"rule": rule}), go_on)

    own = trainer.evaluate(params | kept["local"], data.held_out())
    assert json.loads(work.result.read_bytes())["loss_sum"] == own.loss_sum
    assert own.loss_sum != trainer.evaluate(params, data.held_out()).loss_sum


@pytest.mark.parametrize("runtime", ["torch", "tensorflow"])
def test_the_other_runtimes_train_and_evaluate_alike(
    tmp_path: Path, start: Callable[..., TrainingProcess], runtime: str
) -> None:
    work = job(tmp_path, runtime=runtime, tflite=None, manifest=None)
    training = start()

    training.run(work, go_on)
    training.run(replace(work, kind="evaluate", message={}, result=tmp_path / "sums"), go_on)

    expected = delta(here(work))
    for name, value in delta(work.result.read_bytes()).items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5)
    assert json.loads((tmp_path / "sums").read_bytes())["rows"] == len(open_data(work.data).held_out())


def test_the_state_of_a_client_rule_returns_in_its_next_round(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    """SCAFFOLD: the second round starts from the control variate that the first one left."""
    base = job(tmp_path, message=message({"name": "control_variates"}))
    zeros = {name: np.zeros_like(value) for name, value in arrays.decode(base.params.read_bytes()).items()}
    streams = tmp_path / "streams"
    streams.write_bytes(arrays.encode({f"control/{name}": value for name, value in zeros.items()}))
    first = replace(base, streams=streams)
    second = replace(first, state_in=first.state_out, state_out=tmp_path / "next", result=tmp_path / "second")
    training = start()

    training.run(first, go_on)
    training.run(second, go_on)

    kept = unflatten(arrays.decode(first.state_out.read_bytes()))["control"]
    sent = unflatten(arrays.decode(second.result.read_bytes()))["control"]
    renewed = unflatten(arrays.decode(second.state_out.read_bytes()))["control"]
    assert max(float(np.abs(value).max()) for value in kept.values()) > 0
    for name, value in renewed.items():
        np.testing.assert_allclose(value, kept[name] + sent[name], atol=1e-5)


def test_what_a_code_did_not_send_returns_in_the_next_round(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    """Two rounds of the same work learn the same; what both send, and what is kept at the end, adds up to it twice."""
    code = known.get("topk", share=0.05, bits=8)
    plain = job(tmp_path)
    first = replace(plain, message={**plain.message, "code": known.to_options(code)})
    second = replace(first, state_in=first.state_out, state_out=tmp_path / "next", result=tmp_path / "second")
    training = start()

    training.run(first, go_on)
    training.run(second, go_on)

    learnt = delta(here(plain))
    shapes = {name: value.shape for name, value in learnt.items()}
    sent = [
        decode(code, arrays.decode(work.result.read_bytes())["delta"].tobytes(), shapes)
        for work in (first, second)
    ]
    kept = unflatten(arrays.decode(second.state_out.read_bytes()))["residual"]
    assert first.result.stat().st_size < len(here(plain)) / 5
    for name, value in learnt.items():
        np.testing.assert_allclose(sent[0][name] + sent[1][name] + kept[name], 2 * value, atol=1e-6)


@pytest.mark.parametrize("runtime", ["litert", "torch", "tensorflow"])
def test_an_update_is_scaled_down_before_it_is_written(
    tmp_path: Path, start: Callable[..., TrainingProcess], runtime: str
) -> None:
    work = job(tmp_path, runtime=runtime)
    norm = Update(delta(here(work)), 1, 1, 0.0).norm
    clipped = replace(work, message={**work.message, "clip_norm": norm / 4})

    done = start().run(clipped, go_on)

    sent = Update(delta(work.result.read_bytes()), 1, 1, 0.0)
    assert sent.norm == pytest.approx(norm / 4, rel=1e-5)
    for name, value in delta(here(work)).items():
        np.testing.assert_allclose(sent.delta[name], value / 4, atol=1e-5)
    assert done.treated == (f"scaled down to norm {norm / 4:g} at most",)


@pytest.mark.usefixtures("plug_in")
def test_a_builder_that_returns_a_bare_module_is_trained(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    rng = np.random.default_rng(0)
    params = tmp_path / "bare"
    params.write_bytes(
        arrays.encode(
            {"1.weight": rng.standard_normal((10, 64)).astype(np.float32), "1.bias": np.zeros(10, np.float32)}
        )
    )
    model = ModelRef("bare", {}, (8, 8), 10, "float32", "classification")
    work = job(tmp_path, runtime="torch", model=model, params=params)

    start().run(work, go_on)

    assert set(delta(work.result.read_bytes())) == {"1.weight", "1.bias"}


def refused(training: TrainingProcess, work: TrainingJob) -> TrainingFailed:
    with pytest.raises(TrainingFailed) as failed:
        training.run(work, go_on)
    return failed.value


def test_an_artifact_that_fails_its_self_test_is_refused(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    work = job(tmp_path)
    assert work.manifest is not None
    document = json.loads(work.manifest.read_bytes())
    document["golden"]["loss"] += 1
    wrong = tmp_path / "manifest"
    wrong.write_text(json.dumps(document))
    cut = tmp_path / "cut"
    cut.write_bytes(b"cut short")
    training = start()

    unlike, other_file = (
        refused(training, replace(work, manifest=wrong)),
        refused(training, replace(work, tflite=cut)),
    )

    assert unlike.code == other_file.code == "bad_artifact"
    assert "self-test failed: train gave loss" in unlike.message
    assert "cut has 9 bytes, its manifest says" in other_file.message
    training.run(work, go_on)


def test_data_that_does_not_fit_the_model_is_reported_in_plain_text(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    work, training = job(tmp_path), start()
    flat = DataConfig("numpy", work.data.path, {"shape": [64]})
    few = replace(work.model, classes=3)
    none = DataConfig("numpy", work.data.path, {"held_out": 0.0})

    answers = [
        refused(training, replace(work, data=flat)),
        refused(training, replace(work, model=few)),
        refused(training, replace(work, data=DataConfig("numpy", tmp_path / "gone.npz"))),
        refused(training, replace(work, kind="evaluate", message={}, data=none)),
    ]

    assert {answer.code for answer in answers} == {"no_data"}
    assert (
        "examples of shape [64], the model 'cnn' takes [8, 8]; see the option `shape`" in answers[0].message
    )
    assert "has a label 9, the model 'cnn' has 3 classes" in answers[1].message
    assert "gone.npz: no such file" in answers[2].message
    assert "gone.npz" not in answers[2].decline.words and "data preview" in answers[2].decline.words
    assert "no rows are held out for evaluation" in answers[3].message


def test_an_artifact_for_smaller_batches_than_the_tasks_is_declined(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    work, training = job(tmp_path), start()
    _, manifest = exported(MODEL)
    batch = 2 * manifest.batch_size
    many = tmp_path / "many.npz"
    np.savez(many, x=np.zeros((3 * batch, 8, 8), np.float32), y=np.zeros(3 * batch, np.int32))

    answer = refused(
        training,
        replace(work, message={**work.message, "batch_size": batch}, data=DataConfig("numpy", many)),
    )

    assert answer.code == "bad_artifact"
    assert (
        f"a batch of {batch} rows does not fit this artifact, made for {manifest.batch_size}"
        in answer.message
    )


@pytest.mark.parametrize("mu", [None, "0.1", True, -1.0, float("nan"), float("inf")])
def test_an_option_of_a_client_rule_that_makes_no_sense_is_reported(
    tmp_path: Path, start: Callable[..., TrainingProcess], mu: object
) -> None:
    answer = refused(start(), job(tmp_path, message=message({"name": "proximal", "mu": mu})))

    assert answer.code == "failed"
    assert "client rule 'proximal' comes with mu = " in answer.decline.words


@pytest.mark.parametrize("name", ["unheard-of", "os:system", "models.zoo.cnn:spec"])
def test_only_installed_models_are_built(
    tmp_path: Path, start: Callable[..., TrainingProcess], name: str
) -> None:
    model = ModelRef(name, {}, (8, 8), 10, "float32", "classification")

    answer = refused(start(), job(tmp_path, runtime="torch", model=model))

    assert answer.code == "no_model"
    assert f"the model {name!r} is not installed here; installed: " in answer.message


def test_a_message_of_another_kind_fails_in_words(
    tmp_path: Path, start: Callable[..., TrainingProcess]
) -> None:
    answer = refused(start(), job(tmp_path, message=message({"name": "of the future"})))

    assert answer.code == "failed"
    assert "client rule 'of the future' is unknown here" in answer.message


@pytest.mark.usefixtures("plug_in")
class TestLimits:
    def test_a_grab_for_memory_fails_at_once_and_the_process_goes_on(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        training = start(memory_bytes=200_000_000)

        answer = refused(training, job(tmp_path, data=naughty("grab")))

        assert (answer.code, answer.message) == (
            "limits",
            "it needs more memory than limits.memory_bytes = 200000000",
        )
        training.run(job(tmp_path, data=naughty("behave")), go_on)

    def test_memory_that_grows_beyond_the_limit_ends_the_process(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        training = start(memory_bytes=100_000_000)

        answer = refused(training, job(tmp_path, data=naughty("grow")))

        assert answer.code == "limits"
        assert "more memory than limits.memory_bytes = 100000000: " in answer.message
        assert training.pid is None

    def test_a_job_that_spins_is_ended_by_its_processor_time(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        answer = refused(start(cpu_seconds=1), job(tmp_path, data=naughty("spin")))

        assert (answer.code, answer.message) == ("limits", "it used more than limits.cpu_seconds = 1")

    def test_a_job_that_takes_too_long_is_ended(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        answer = refused(start(seconds=0.6), job(tmp_path, data=naughty("sleep")))

        assert (answer.code, answer.message) == ("limits", "not done after limits.seconds = 0.6")

    def test_a_crash_is_reported_and_the_next_job_gets_a_new_process(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        training = start()

        crashed = refused(training, job(tmp_path, data=naughty("abort")))
        failed = refused(training, job(tmp_path, data=naughty("fail")))

        assert crashed.code == "failed" and "ended with SIGABRT" in crashed.message
        assert "RuntimeError: as told" in failed.message
        # What foreign code says may quote what it read.
        assert "as told" not in failed.decline.words
        assert crashed.decline.words == "the training process ended with SIGABRT"
        training.run(job(tmp_path, data=naughty("behave")), go_on)


@pytest.mark.usefixtures("plug_in")
class TestEnds:
    @pytest.mark.parametrize("does", ["sleep", "hold_interpreter"])
    def test_a_reason_not_to_go_on_ends_the_job_and_its_process(
        self, tmp_path: Path, start: Callable[..., TrainingProcess], does: str
    ) -> None:
        training, seen = start(), []

        def unplugged() -> str | None:
            seen.append(training.pid)
            return "on battery" if len(seen) > 1 else None

        with pytest.raises(Interrupted, match="on battery"):
            training.run(job(tmp_path, data=naughty(does)), unplugged)

        assert training.pid is None
        assert_gone(seen[0])

    def test_a_service_manager_that_stops_the_whole_group_leaves_the_decision_to_the_daemon(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        training, seen = start(), []

        def stopping() -> str | None:
            assert training.pid is not None
            os.kill(training.pid, signal.SIGTERM)
            seen.append(training.pid)
            return "the daemon ends" if len(seen) > 1 else None

        with pytest.raises(Interrupted, match="the daemon ends"):
            training.run(job(tmp_path, data=naughty("sleep")), stopping)

        assert_gone(seen[0])

    def test_an_idle_process_ends_by_itself(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        training, work = start(idle_seconds=0.1), job(tmp_path, data=naughty("behave"))
        training.run(work, go_on)
        first = training.pid

        if first is not None:
            assert_gone(first)
        training.run(work, go_on)

        assert first is None or training.pid != first

    def test_another_thread_gets_a_process_of_its_own(
        self, tmp_path: Path, start: Callable[..., TrainingProcess]
    ) -> None:
        """The kernel ends a process with the thread that started it."""
        training, work = start(), job(tmp_path, data=naughty("behave"))
        pids = []

        def one() -> None:
            training.run(work, go_on)
            pids.append(training.pid)

        thread = threading.Thread(target=one)
        thread.start()
        thread.join()
        one()

        assert None not in pids and pids[0] != pids[1]

    @pytest.mark.parametrize("does", ["sleep", "spin", "hold_interpreter"])
    def test_a_killed_daemon_leaves_no_process(self, tmp_path: Path, does: str) -> None:
        code = (
            "import sys\n"
            "from pathlib import Path\n"
            "from edge_client.train.process import Limits, TrainingProcess\n"
            "from tests.support.training_jobs import job, naughty\n"
            "folder = Path(sys.argv[1])\n"
            "training = TrainingProcess(folder / 'log', Limits(0, 0, 0))\n"
            "tell = lambda: print(training.pid, flush=True)\n"
            f"training.run(job(folder, data=naughty({does!r})), tell)\n"
        )
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{root}"}
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as daemon:
            assert daemon.stdout is not None
            child = int(daemon.stdout.readline())
            handle = os.pidfd_open(child)
            daemon.kill()
        assert select.select([handle], [], [], PATIENT_SECONDS)[0], "the training process lives on"
        os.close(handle)


def assert_gone(pid: int | None) -> None:
    assert pid is not None
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], PATIENT_SECONDS)[0], "the training process lives on"
    os.close(handle)
