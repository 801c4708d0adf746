"""A training that was saved goes on under any plan as if it had not stopped; what is no checkpoint is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from models.job import JobError
from models.pretrain import trainer, world
from models.pretrain.params import params_of
from models.pretrain.plan import ParallelPlan, parse
from models.pretrain.recovery import checkpoint, manifest, state
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.curve import Curve
from models.pretrain.recovery.export import export
from models.pretrain.recovery.manifest import CheckpointError
from tests.models.pretrain import resumed
from tests.models.pretrain.curves import small_gpt
from tests.support import ranks
from tests.support.long import extended
from tests.support.small_disk import fill, small_disk

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
HELPERS = "tests.models.pretrain.resumed"
MODEL = {"vocab": 51}  # which no degree but 3 divides

# Every one is saved under and loaded by every kind of other: after k steps along this ring comes what it loads.
PLANS = [
    "dp=1",
    "dp=3,zero=1",
    "dp=4,zero=3",
    "tp=2,dp=2",
    "pp=2,schedule=interleaved",
    "cp=2,dp=2",
    "dp=2,zero=2",
    "pp=2,dp=2,tp=2",
]
STRIDES = (1, 3)


class Saved(dict[str, Path]):
    """Folders of checkpoints by plan; each plan trains when its folder is first asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, plan: str) -> Path:
        ranks.run(parse(plan).processes, f"{HELPERS}:saved", plan, self.root / plan, MODEL)
        self[plan] = self.root / plan
        return self[plan]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process that was never interrupted."""
    return ranks.run(1, f"{HELPERS}:saved", "dp=1", tmp_path_factory.mktemp("alone"), MODEL)[0]


@pytest.mark.parametrize(
    "place", [1, *extended(*(at for at in range(len(PLANS)) if at != 1))], ids=lambda at: PLANS[at]
)
def test_a_training_goes_on_under_another_plan(
    place: int, saved: dict[str, Path], alone: list[float]
) -> None:
    """The saved state is that of step 3, though three more steps ran while it was written."""
    plan = PLANS[place]
    others = [PLANS[(place + stride) % len(PLANS)] for stride in STRIDES]
    found = ranks.run(
        parse(plan).processes, f"{HELPERS}:resumed", plan, {name: saved[name] for name in others}, MODEL
    )
    for before in others:
        for losses, _ in (rank[before] for rank in found):
            np.testing.assert_allclose(
                losses, alone[resumed.SAVED_AT :], atol=TOLERANCE, err_msg=f"{before} -> {plan}"
            )


@pytest.mark.extended
def test_split_and_unsplit_experts_resume_as_each_other(tmp_path: Path) -> None:
    model = {"name": "moe", "experts": 4}
    folders = {"ep": tmp_path / "ep", "whole": tmp_path / "whole"}
    expected = ranks.run(2, f"{HELPERS}:saved", "dp=2,ep=2", folders["ep"], model)[0]
    ranks.run(1, f"{HELPERS}:saved", "dp=1", folders["whole"], model)
    for plan in ("dp=2,ep=2", "dp=1"):
        for found in ranks.run(parse(plan).processes, f"{HELPERS}:resumed", plan, folders, model):
            for name, (losses, _) in found.items():
                np.testing.assert_allclose(
                    losses, expected[resumed.SAVED_AT :], atol=TOLERANCE, err_msg=f"{name} -> {plan}"
                )


def test_without_its_optimizer_state_a_training_would_go_on_otherwise(
    saved: dict[str, Path], alone: list[float]
) -> None:
    """The control: the comparison above notices what is missing."""
    with _one() as here:
        training, _ = resumed.begin(here, saved["dp=1"], MODEL)
        checkpoint.load(state.State(training.parallel.parts, []), _newest(saved["dp=1"]))
        training.step = resumed.SAVED_AT
        losses = resumed.steps(training, training.steps)
    assert losses[0] == pytest.approx(alone[resumed.SAVED_AT], abs=TOLERANCE)
    assert np.abs(np.subtract(losses, alone[resumed.SAVED_AT :])).max() > 100 * TOLERANCE


def test_dropout_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with _one() as here:
        training, checkpointer = resumed.begin(here, tmp_path, dropout=0.3)
        resumed.steps(training, 2)
        checkpointer.save(training.state, training.step)
        expected = resumed.steps(training, training.steps)
        checkpointer.wait()
        again, restoring = resumed.begin(here, tmp_path, dropout=0.3)
        again.step = restoring.restore(again.state)
        assert resumed.steps(again, again.steps) == expected
        other, _ = resumed.begin(here, tmp_path, dropout=0.3)
        other.step = restoring.restore(other.state)
        other.parallel.parts[0].get_submodule("norm.1").eval()
        assert resumed.steps(other, other.steps) != expected  # there was some


def test_data_order_goes_on_where_it_was(saved: dict[str, Path]) -> None:
    with _one() as here:
        full, _ = resumed.begin(here, saved["dp=1"], MODEL)
        rows = [full.batches.rows(step).tolist() for step in range(full.steps)]
    for _, again in ranks.run(2, f"{HELPERS}:resumed", "dp=2", {"": saved["tp=2,dp=2"]}, MODEL)[0].values():
        assert again == rows[resumed.SAVED_AT :]


def test_a_killed_process_leaves_no_invalid_checkpoint(tmp_path: Path, saved: dict[str, Path]) -> None:
    """A half-written one is passed over and removed, however much of it is there."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved["dp=1"], folder)
    shutil.copytree(_newest(folder), folder / "step-00000009.tmp")
    assert manifest.steps_in(folder) == [resumed.SAVED_AT]
    with _one() as here:
        training, checkpointer = resumed.begin(here, folder, MODEL)
        assert checkpointer.restore(training.state) == resumed.SAVED_AT
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_another_training_is_refused_by_name(tmp_path: Path, saved: dict[str, Path]) -> None:
    with _one() as here:
        other, checkpointer = resumed.begin(here, saved["dp=1"], {"vocab": 52})
        with pytest.raises(
            CheckpointError, match=r"another model: tensor 'embedding.token.weight' is \(51, 32\) there"
        ):
            checkpointer.restore(other.state)
        other, checkpointer = resumed.begin(here, saved["dp=1"], MODEL, batch_size=4)
        with pytest.raises(CheckpointError, match=r"batch_size was 8 and is 4; set it back"):
            checkpointer.restore(other.state)
        other, checkpointer = resumed.begin(here, saved["dp=1"], MODEL)
        with pytest.raises(CheckpointError, match=r"earlier training, up to step 3: set resume = true"):
            checkpointer.run = "another launch"
            checkpointer.restore(other.state, same_run=True)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, saved: dict[str, Path]) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved["dp=1"], folder)
    shards = next(_newest(folder).glob("*.safetensors"))
    shards.write_bytes(shards.read_bytes()[:1000])
    with _one() as here:
        training, checkpointer = resumed.begin(here, folder, MODEL)
        with pytest.raises(
            CheckpointError, match=rf"{shards.name} has changed .*no whole checkpoint is left"
        ):
            checkpointer.restore(training.state)
        (_newest(folder) / "about.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"about.json is not the description of a checkpoint"):
            checkpointer.restore(training.state)
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        manifest.steps_in(not_a_folder)


def test_every_bit_that_flips_is_noticed(tmp_path: Path, saved: dict[str, Path]) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved["dp=1"], folder)
    newest = _newest(folder)
    rng = np.random.default_rng(0)
    files = sorted(newest.iterdir())
    for turn in range(120):
        path = files[turn % len(files)]
        content = bytearray(path.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        full = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(CheckpointError):
            manifest.verify_files(newest, manifest.read_manifest(newest))
        path.write_bytes(full)
    manifest.verify_files(newest, manifest.read_manifest(newest))


def test_a_training_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path) -> None:
    with _one() as here:
        training, checkpointer = resumed.begin(here, tmp_path, MODEL)
        for step in (1, 2, 3):
            resumed.steps(training, 1)
            checkpointer.save(training.state, step)
        checkpointer.wait()
        assert manifest.steps_in(tmp_path) == [2, 3]
        path = next(manifest.path_of(tmp_path, 3).glob("*.safetensors"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        again, restoring = resumed.begin(here, tmp_path, MODEL)
        assert restoring.restore(again.state) == 2
        (notice,) = restoring.notices
        assert "step-00000003" in notice and notice.endswith("going on from the checkpoint of step 2")
        assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000002", "step-00000003.damaged"]


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4) as folder, _one() as here:
        training, checkpointer = resumed.begin(here, folder)
        checkpointer.save(training.state, 0)
        checkpointer.wait()
        resumed.steps(training, 1)  # with optimizer state it is three times as large
        fill(folder / "filler", leave_bytes=100_000)
        with pytest.raises(
            CheckpointError, match=r"step 1 could not be written to .*No space left.*that of step 0 is whole"
        ):
            checkpointer.save(training.state, 1)
            checkpointer.wait()
        assert manifest.steps_in(folder) == [0]
        again, restoring = resumed.begin(here, folder)
        assert restoring.restore(again.state) == 0
        (folder / "filler").unlink()
        checkpointer.save(training.state, 1)
        checkpointer.wait()
        assert manifest.steps_in(folder) == [0, 1]


@given(
    steps=st.lists(st.integers(1, 200), unique=True, min_size=1, max_size=20),
    keep=st.integers(1, 5),
    keep_every=st.sampled_from([0, 10, 50]),
)
def test_the_latest_and_every_so_manieth_stay(steps: list[int], keep: int, keep_every: int) -> None:
    stay = set(steps) - set(Policy(keep=keep, keep_every=keep_every).expired(steps))
    assert set(sorted(steps)[-keep:]) <= stay
    assert {step for step in stay if step not in sorted(steps)[-keep:]} == {
        step for step in steps if keep_every and step % keep_every == 0 and step not in sorted(steps)[-keep:]
    }


def test_a_training_keeps_what_its_policy_says(tmp_path: Path) -> None:
    with _one() as here:
        training, _ = resumed.begin(here, tmp_path)
        policy = Policy(every=1, keep=2, keep_every=3)
        trainer.train(training, lambda _: None, 100, Checkpointer(tmp_path, policy, training.identity, here))
    assert manifest.steps_in(tmp_path) == [3, 5, 6]


@pytest.mark.extended
@pytest.mark.parametrize("plan", ["tp=2,dp=2", *extended("pp=2,dp=2,tp=2")])
def test_a_checkpoint_becomes_a_plain_params_file(plan: str, tmp_path: Path, saved: dict[str, Path]) -> None:
    """From many processes' shards, by one that knows nothing of their plan."""
    job = tmp_path / "job.json"
    model = {"name": "gpt", "input_shape": [16], "classes": 51, "input_dtype": "int32", "task": "next_token"}
    job.write_text(json.dumps({"model": {**model, "options": {"width": 32, "layers": 4, "heads": 4}}}))
    out = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "models.pretrain.recovery.export", saved[plan], job, out],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == resumed.SAVED_AT
    with _one() as here:
        training, _ = resumed.begin(here, tmp_path / "none", MODEL)
        resumed.steps(training, resumed.SAVED_AT)
        expected = params_of(training.parallel.parts[0])
    found = safetensors.numpy.load(out.read_bytes())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Adam divides by the root of squared gradients: where they are tiny, rounding moves a param further than a loss.
        np.testing.assert_allclose(found[name], value, atol=5 * TOLERANCE, err_msg=name)
    with pytest.raises(JobError, match=r"belongs to another model: tensor 'embedding.token.weight'"):
        export(saved["dp=1"], small_gpt(), out)
    with pytest.raises(JobError, match="holds no checkpoint"):
        export(tmp_path / "none", small_gpt(), out)


def test_a_curve_is_cut_where_the_training_goes_on(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "curve.jsonl")
    curve.add(1, [3.0, 2.0, 1.0], [0.1, 0.1, 0.1], plan="dp=2")
    with curve.path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    curve.cut(2)
    curve.add(3, [1.5], [0.1], plan="dp=1")
    assert curve.losses() == [3.0, 2.0, 1.5]
    assert [point["plan"] for point in curve.points()] == ["dp=2", "dp=2", "dp=1"]


def _one() -> AbstractContextManager[world.World]:
    return world.join(ParallelPlan())


def _newest(folder: Path) -> Path:
    return manifest.path_of(folder, manifest.steps_in(folder)[-1])
