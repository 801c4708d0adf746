"""A plan reads as it is written, divides a model without remainder, and is refused with every reason."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain import plan as plans
from models.pretrain.plan import ParallelPlan, PlanError, Sizes, parse
from models.pretrain.plan_rules import check
from models.pretrain.training import TrainingOptions

SIZES = Sizes(layers=8, heads=4, width=32, hidden=128, vocab=50, length=16, attention=True, tensor=True)


def _values(field: dataclasses.Field[object], hint: object) -> st.SearchStrategy[object]:
    if typing.get_origin(hint) is typing.Literal:
        return st.sampled_from(typing.get_args(hint))
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(*field.metadata["range"])
    if field.name == "devices":
        return st.lists(st.sampled_from(["cpu", "cuda"]), max_size=5).map(tuple)
    return st.lists(st.integers(1, 100), max_size=5).map(tuple)


any_plan = st.builds(
    ParallelPlan,
    **{
        field.name: _values(field, typing.get_type_hints(ParallelPlan)[field.name])
        for field in dataclasses.fields(ParallelPlan)
    },
)


@given(any_plan)
def test_a_plan_reads_as_it_is_written(plan: ParallelPlan) -> None:
    assert parse(str(plan)) == plan


@given(any_plan)
def test_a_plan_survives_a_table(plan: ParallelPlan) -> None:
    """As in a configuration or job file, where tuples are lists."""
    table = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in dataclasses.asdict(plan).items()
    }
    assert plans.from_table(table) == plan


@given(
    layers=st.integers(1, 200),
    pp=st.integers(1, 8),
    schedule=st.sampled_from(typing.get_args(plans.Schedule)),
    stages=st.integers(1, 4),
)
def test_layers_are_shared_out_without_remainder(
    layers: int, pp: int, schedule: plans.Schedule, stages: int
) -> None:
    plan = ParallelPlan(pp=pp, schedule=schedule, stages=stages)
    of_stages = plan.layers_per_stage(layers)
    assert [layer for stage in of_stages for layer in stage] == list(range(layers))
    assert len(of_stages) == plan.virtual_stages
    assert max(map(len, of_stages)) - min(map(len, of_stages)) <= 1


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
def test_a_split_is_followed(counts: list[int]) -> None:
    plan = parse(f"pp={len(counts)},split={'+'.join(map(str, counts))}")
    of_stages = plan.layers_per_stage(sum(counts))
    assert [len(stage) for stage in of_stages] == counts
    assert [layer for stage in of_stages for layer in stage] == list(range(sum(counts)))


@given(any_plan)
def test_axes_multiply_to_the_processes(plan: ParallelPlan) -> None:
    assert plan.processes == plan.pp * plan.dp * plan.cp * plan.tp


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dp", "'dp' is not of the form key=value"),
        ("shard=2", "unknown key 'shard', did you mean 'shards'?"),
        ("dp=two", "dp is 'two', expected a whole number from 1 to 65536"),
        ("dp=0", "dp is 0, expected a whole number from 1"),
        ("zero=4", "expected a whole number from 0 to 3"),
        ("schedule=2f2b", "schedule is '2f2b', expected one of 'naive', 'gpipe'"),
        ("sequence=maybe", "sequence is 'maybe', expected true or false"),
        ("split=2+0", "split[1] is 0, expected a whole number from 1"),
        ("devices=cpu+tpu", "devices[1] is 'tpu', expected one of 'cpu', 'cuda'"),
    ],
)
def test_text_that_is_no_plan_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse(text)
    assert reason in str(raised.value)


REFUSED = [
    (
        "tp=2,compile=true,activation_checkpoint=selective",
        "tp=2 with compile: torch cannot compile selective recomputation of matrices that tp splits; use",
    ),
    ("tp=3", "tp=3 must divide the 4 heads"),
    ("tp=8", "tp=8 must divide the 4 heads"),
    ("sequence=true", "sequence splits over the tp ranks"),
    ("loss_parallel=true", "loss_parallel needs tp of 2 or more"),
    ("cp=3", "cp=3 must divide the 4 heads"),
    ("cp=3", "cp=3 must divide the 16 tokens"),
    ("tp=4,cp=2", "cp=2 must divide the 1 heads of a tp rank"),
    ("dp=2,ep=2", "ep needs a model with experts"),
    ("pp=16,schedule=gpipe,microbatches=1", "16 stages need as many layers, the model has 8"),
    ("pp=8,schedule=interleaved", "16 stages need as many layers, the model has 8"),
    ("pp=2,split=4+3+1", "split names 3 stages, the schedule has 2"),
    ("pp=2,split=4+3", "split adds up to 7, there are 8 layers"),
    ("split=8", "split needs pp of 2 or more"),
    ("devices=cpu", "devices needs pp of 2 or more"),
    ("stages=2", "stages needs pp of 2 or more"),
    ("dp=2,shards=2", "shards needs zero=2 or 3"),
    ("dp=4,zero=3,shards=3", "shards=3 must divide dp=4"),
    ("dp=2,tp=2,grad_compression=bf16", "grad_compression=bf16 goes with dp alone"),
    ("dp=2,zero=2,offload=cpu", "offload=cpu needs zero=3"),
    ("dp=64", "a batch of 48 rows cannot be shared by dp=64 ranks"),
    ("pp=2,microbatches=5,schedule=gpipe", "dp·microbatches=5 must divide the 48 rows"),
]


@pytest.mark.parametrize(("text", "reason"), REFUSED)
def test_an_impossible_plan_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(PlanError) as raised:
        check(parse(text), SIZES, TrainingOptions(batch_size=48))
    assert reason in str(raised.value)
    assert str(raised.value).startswith(f"plan {parse(text)}: ")


def test_all_reasons_are_given_at_once() -> None:
    with pytest.raises(PlanError) as raised:
        check(parse("tp=3,split=8,loss_parallel=true"), SIZES, TrainingOptions(batch_size=48), processes=2)
    for reason in ("need 3 processes, there are 2", "must divide the 4 heads", "split needs pp"):
        assert reason in str(raised.value)


def test_a_model_that_cannot_be_taken_apart_is_only_replicated() -> None:
    check(parse("dp=4"), Sizes(), TrainingOptions(batch_size=8))
    with pytest.raises(PlanError, match="where its attention is"):
        check(parse("cp=2"), dataclasses.replace(SIZES, attention=False), TrainingOptions(batch_size=8))
    for text, reason in [("tp=2", "`layout`"), ("pp=2", "the model has 0"), ("cp=2", "attention")]:
        with pytest.raises(PlanError, match=reason):
            check(parse(text), Sizes(), TrainingOptions(batch_size=8))


@pytest.mark.parametrize(
    ("former", "text"),
    [
        ("exchange=powersgd", "grad_compression=powersgd"),
        ("recompute=full", "activation_checkpoint=full"),
        ("rows=3+1", "batch_shares=3+1"),
    ],
)
def test_former_names_of_keys_are_read(former: str, text: str) -> None:
    key, _, value = former.partition("=")
    assert parse(f"dp=2,{former}") == parse(f"dp=2,{text}") == plans.from_table({"dp": 2, key: value})
    assert str(parse(former)) == text
    assert parse(text, {key: value}) == parse(former, {text.partition("=")[0]: value}) == parse(text)


def test_a_key_under_both_its_names_is_refused() -> None:
    with pytest.raises(PlanError, match="recompute is the former name of activation_checkpoint"):
        parse("recompute=full,activation_checkpoint=full")


def test_micro_batches_default_to_two_a_stage() -> None:
    assert parse("dp=8").num_microbatches == 1
    assert parse("pp=4").num_microbatches == 8
    assert parse("pp=4,microbatches=5").num_microbatches == 5


@given(any_plan, st.sampled_from([SIZES, Sizes()]), st.integers(1, 64))
def test_checking_ends_in_nothing_or_a_reason(plan: ParallelPlan, sizes: Sizes, batch_size: int) -> None:
    try:
        check(plan, sizes, TrainingOptions(batch_size=batch_size))
    except PlanError as error:
        assert str(error) != f"plan {plan}: "


def test_options_that_a_plan_cannot_follow_are_refused_with_every_reason() -> None:
    check(parse("dp=2,grad_compression=onebit"), SIZES, TrainingOptions(optimizer="adamw"))
    check(parse("dp=2"), SIZES, TrainingOptions(optimizer="sgd", clip_norm=1.0))
    with pytest.raises(PlanError, match=r"optimizer is 'sgd'.*clip_norm is 1\.0, expected 0"):
        check(parse("dp=2,grad_compression=onebit"), SIZES, TrainingOptions(optimizer="sgd", clip_norm=1.0))
