"""Few params trained on frozen ones: under every plan those of one process, and nothing else changes or is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import adaptation, zoo
from models import job as jobs
from models.job import JobError, read_params
from models.pretrain import initial, params, trainer, world
from models.pretrain import plan as plans
from models.pretrain.parallelize import require_splittable
from models.pretrain.plan import PlanError
from models.pretrain.recovery import fine_tuning
from models.pretrain.recovery.checkpoint import Checkpointer, Policy
from models.pretrain.recovery.export import export
from models.pretrain.recovery.manifest import CheckpointError
from models.zoo import adapted
from models.zoo.calls import called_layers
from tests.models.pretrain.curves import settings, spec_of, tokens
from tests.models.pretrain.fine_tuned import spec_on
from tests.support import ranks
from tests.support.long import extended

pytestmark = pytest.mark.slow  # imports torch.distributed, which takes seconds

HERE = "tests.models.pretrain.fine_tuned"
EXPERTS: dict[str, Any] = {"name": "moe", "experts": 4}
TOLERANCE = 1e-5

REPRESENTATIVES: list[tuple[str, dict[str, Any]]] = [
    ("tp=2,zero=3,sequence=true", {}),
    ("pp=2", {}),
    ("dp=2,zero=3", {}),
    ("dp=2,ep=2,zero=2", EXPERTS),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        (plan, {})
        for plan in (
            "dp=2",
            "dp=2,zero=1",
            "dp=2,zero=2",
            "dp=2,zero=3,offload=disk",
            "dp=2,activation_checkpoint=selective",
            "tp=2",
            "tp=2,sequence=true,loss_parallel=true",
            "cp=2",
            "pp=2,schedule=zbv",
            "pp=2,schedule=zero-bubble",
            "pp=2,schedule=interleaved,activation_checkpoint=full",
        )
    ),
    ("dp=2,ep=2", EXPERTS),
    ("dp=2,ep=2,zero=3", EXPERTS),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the params of two models."""
    folder = tmp_path_factory.mktemp("base")
    for model in ({}, EXPERTS):
        spec = spec_of(**model)
        params.save(spec.build(1), folder / f"{spec.name}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("adapt", "cases"),
    [
        ("lora(2, 4)", REPRESENTATIVES),
        *extended(("lora(2, 4)", CASES), ("head", [CASES[0], CASES[5], REPRESENTATIVES[0]])),
    ],
    ids=["representatives", "all", "head"],
)
def test_a_plan_fine_tunes_as_one_process(
    adapt: str, cases: list[tuple[str, dict[str, Any]]], base: Path
) -> None:
    options = {"clip_norm": 0.5, "steps": 4}
    models = [{}, EXPERTS] if any(model for _, model in cases) else [{}]
    alone = ranks.run(1, f"{HERE}:losses", [("dp=1", model) for model in models], base, adapt, options)[0]

    found = ranks.run(2, f"{HERE}:losses", cases, base, adapt, options)[0]

    for (plan, model), (losses, merged) in zip(cases, found, strict=True):
        expected, whole = alone[models.index(model)]
        np.testing.assert_allclose(losses, expected, atol=TOLERANCE, err_msg=plan)
        assert merged.keys() == whole.keys()
        for name, value in merged.items():
            np.testing.assert_allclose(value, whole[name], atol=TOLERANCE, err_msg=f"{plan} {name}")


def test_a_checkpoint_has_only_what_is_trained_and_resumes_under_another_plan(
    base: Path, tmp_path: Path
) -> None:
    _, names, expected = ranks.run(1, f"{HERE}:saved_and_resumed", "dp=1", base, tmp_path, False)[0]
    begun, _, losses = ranks.run(2, f"{HERE}:saved_and_resumed", "tp=2,sequence=true", base, tmp_path, True)[
        0
    ]

    trained = {name for name in names if not name.startswith("optim.")}
    assert (
        all(name == "head.weight" or ".lora_" in name for name in trained) and len(trained) == 1 + 4 * 6 * 2
    )
    assert {name.rpartition(".")[0].removeprefix("optim.") for name in set(names) - trained} == trained
    assert begun == 3
    np.testing.assert_allclose(losses, expected, atol=TOLERANCE)

    spec = spec_on(base / "gpt.safetensors", "lora(2)", {})
    export(tmp_path, spec, tmp_path / "exported.safetensors")
    exported, before = read_params(tmp_path / "exported.safetensors"), read_params(base / "gpt.safetensors")
    assert exported.keys() == before.keys()
    same = {name for name in before if np.array_equal(before[name], exported[name])}
    assert same == {name for name in before if "norm" in name or name.startswith("embedding.")}

    other = fine_tuning.with_adapters(spec_of(), "lora(2)", "other params")
    with world.join(plans.parse("dp=1")) as here:
        training = trainer.build(other, tokens(), settings(), here, seed=5)
        checkpointer = Checkpointer(tmp_path, Policy(), training.identity, here)
        with pytest.raises(CheckpointError, match=r"the params of model\.init have changed since"):
            checkpointer.restore(training.state)


def test_the_saved_adapters_merged_by_the_coordinator_are_the_saved_model(base: Path, tmp_path: Path) -> None:
    spec = spec_on(base / "gpt.safetensors", "lora(2, 4)", {})
    module = spec.build(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    x = torch.from_numpy(tokens().x[:3])
    expected = module(x)

    path = tmp_path / "model.safetensors"
    tensors = (tensor for _, tensor in sorted(params.float_tensors(module).items()))
    described = fine_tuning.write(path, module, tensors)["adapters"]

    merged_module = spec_of().build(0)
    params.fill(merged_module, read_params(path), "merged")
    torch.testing.assert_close(merged_module(x), expected, rtol=1e-4, atol=1e-5)
    adapters = read_params(tmp_path / fine_tuning.ADAPTERS)
    assert described["parameters"] == sum(value.size for value in adapters.values())
    merged = adaptation.merge(read_params(base / "gpt.safetensors"), adapters, adaptation.parse("lora(2, 4)"))
    for name, value in params.params_of(merged_module).items():
        np.testing.assert_allclose(value, merged[name], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["gpt", "moe", "bert", "lstm"])
def test_the_order_of_layers_needs_no_forward_pass(name: str) -> None:
    options: dict[str, Any] = {"width": 16} if name == "lstm" else {"width": 16, "heads": 2}
    spec = zoo.get(name, input_shape=(8,), classes=5, **options)

    def linear(names: list[str]) -> list[str]:
        module = spec.build(0)
        return [each for each in names if type(module.get_submodule(each)) is torch.nn.Linear]

    called = linear(called_layers(spec.build(0).eval(), spec))
    assert sorted(called) == sorted(linear(adapted.layer_order(spec)))
    assert called[-1] == linear(adapted.layer_order(spec))[-1]


def test_a_head_that_is_the_embedding_stays_frozen() -> None:
    spec = spec_of(tie=True)

    module = fine_tuning.with_adapters(spec, "lora(2)", "base").build(0)

    assert all(".lora_" in name for name, p in module.named_parameters() if p.requires_grad)
    with pytest.raises(
        JobError, match=r"shares its weight with 'embedding.token.weight'; take adapt = 'lora"
    ):
        fine_tuning.with_adapters(spec, "head", "base")


def test_what_cannot_be_fine_tuned_is_refused(base: Path, tmp_path: Path) -> None:
    def job(**init: Any) -> jobs.JobFile:
        (tmp_path / "job.json").write_text(
            json.dumps({"init": {"params": str(base / "gpt.safetensors"), **init}})
        )
        return jobs.read(tmp_path / "job.json")

    with pytest.raises(
        JobError, match=r"init.adapt = 'lora': 'lora' is not an adaptation; expected head, lora\(r\)"
    ):
        initial.with_init(job(adapt="lora"), spec_of())
    with pytest.raises(PlanError, match=r"pp: 'layers\.0' has nothing to train"):
        module = spec_on(base / "gpt.safetensors", "head", {}).build(0)
        require_splittable(module, spec_of().layout, plans.parse("pp=2"))
