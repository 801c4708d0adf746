"""Intake: every way an update can be wrong has its code and its words, and nothing a client sends raises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from coordinator.rounds import intake
from coordinator.rounds.intake import Reason, Rejection
from coordinator.workers import faults
from edge_client.relay.expected import Expected
from edge_client.wire import arrays
from edge_client.wire.arrays import BytesPayload, FilePayload, encode_result
from strategies import presets
from strategies.params import PIECE, LazyTensors, Params
from strategies.update import Update
from tests.support.federation import task, update
from tests.support.payloads import entry, parsed, raw

MODEL: Params = {"fc.bias": np.zeros(2, np.float32), "fc.weight": np.zeros((2, 3), np.float32)}
TASK = task()
HONEST = update(MODEL)
EXPECTED = intake.make_expected(MODEL, {}, max_examples=1000)


def check(payload: bytes, *, expected: Expected = EXPECTED) -> Any:
    return intake.check(BytesPayload(payload), TASK, expected)


def refused(payload: bytes) -> tuple[str, str]:
    return reported(check(payload))


def reported(verdict: Update | Rejection) -> tuple[str, str]:
    assert isinstance(verdict, Rejection)
    assert verdict.client == "site-a"
    assert verdict.message.startswith("update from site-a, round 3: ")
    return verdict.reason, verdict.message.removeprefix("update from site-a, round 3: ")


def sent(
    *, task_changes: dict[str, Any] | None = None, tensors: Params | None = None, **header: Any
) -> bytes:
    """An honest result with parts of its task, its update's header or its delta replaced."""
    changed = replace(HONEST, **header)
    if tensors is not None:
        changed = replace(changed, delta=tensors)
    return encode_result(replace(TASK.message, **(task_changes or {})), changed)


def honest_delta(**changed: Any) -> Params:
    return {**HONEST.delta, **{name.replace("_", "."): value for name, value in changed.items()}}


NAN = np.full((2, 3), np.nan, np.float32)
CASES: dict[str, tuple[bytes, Reason, str]] = {
    "not a message": (
        b"hello",
        "malformed",
        "5 bytes are too short for a header",
    ),
    "no result header": (
        arrays.encode(HONEST.delta, {}),
        "malformed",
        "result header: round is None, expected int",
    ),
    "too large": (
        b"\0" * (EXPECTED.payload_limit_bytes + 1),
        "oversized",
        f"{EXPECTED.payload_limit_bytes + 1} bytes, at most {EXPECTED.payload_limit_bytes} are allowed",
    ),
    "another model": (
        sent(task_changes={"base": "cd" * 32}),
        "stale_base",
        "it trained model cdcdcdcdcdcd, this round uses abababababab",
    ),
    "another round": (
        sent(task_changes={"round": 2}),
        "wrong_task",
        "it answers round 2 of client 'site-a'",
    ),
    "another client": (
        sent(task_changes={"client": "site-b"}),
        "wrong_task",
        "it answers round 3 of client 'site-b'",
    ),
    "no examples": (
        sent(num_examples=0),
        "no_examples",
        "it claims 0 examples and 3 steps, at least 1 is expected",
    ),
    "less than no examples": (
        sent(num_examples=-4),
        "no_examples",
        "it claims -4 examples and 3 steps, at least 1 is expected",
    ),
    "no steps": (
        sent(num_steps=0),
        "no_examples",
        "it claims 10 examples and 0 steps, at least 1 is expected",
    ),
    "more examples than the run lets anybody claim": (
        sent(num_examples=1001),
        "too_many_examples",
        "it claims 1001 examples, this run takes at most 1000 per client",
    ),
    "more steps than its examples make": (
        sent(num_steps=2**40),
        "wrong_steps",
        f"it claims {2**40} steps; 10 examples give 3 steps",
    ),
    "a tensor short": (
        sent(tensors={"fc.bias": HONEST.delta["fc.bias"]}),
        "missing_tensor",
        "'delta/fc.weight' is missing, 1 of 2 tensors arrived",
    ),
    "nothing at all": (
        sent(tensors={}),
        "missing_tensor",
        "'delta/fc.bias' is missing, 0 of 2 tensors arrived",
    ),
    "a tensor too many": (
        sent(tensors=honest_delta(backdoor=np.zeros(1, np.float32))),
        "extra_tensor",
        "'delta/backdoor' is not a tensor of this model",
    ),
    "a stream nobody asked for": (
        encode_result(TASK.message, replace(HONEST, extras={"control": HONEST.delta})),
        "extra_tensor",
        "'control/fc.bias' is not a tensor of this model",
    ),
    "another name": (
        sent(tensors={"fc.bias": HONEST.delta["fc.bias"], "head.weight": HONEST.delta["fc.weight"]}),
        "misnamed_tensor",
        "has 'delta/head.weight' where 'delta/fc.weight' is expected",
    ),
    "half precision": (
        sent(tensors=honest_delta(fc_bias=np.zeros(2, np.float16))),
        "wrong_dtype",
        "delta/fc.bias is F16, expected F32",
    ),
    "another shape": (
        sent(tensors=honest_delta(fc_weight=np.zeros((3, 2), np.float32))),
        "wrong_shape",
        "delta/fc.weight is (3, 2), expected (2, 3)",
    ),
    "NaN": (
        sent(tensors=honest_delta(fc_weight=NAN)),
        "non_finite",
        "delta/fc.weight holds NaN or infinity; lower the learning rate or check the data",
    ),
    "infinity": (
        sent(tensors=honest_delta(fc_bias=np.array([0, -np.inf], np.float32))),
        "non_finite",
        "delta/fc.bias holds NaN or infinity; lower the learning rate or check the data",
    ),
    "a loss of NaN": (
        sent(train_loss=float("nan")),
        "non_finite",
        "its training loss is nan; lower the learning rate or check the data",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_update_is_refused_with_its_reason_in_words(case: str) -> None:
    payload, reason, words = CASES[case]
    assert refused(payload) == (reason, words)


def test_a_second_update_is_a_duplicate() -> None:
    assert reported(intake.reject_duplicate(TASK)) == (
        "duplicate",
        "this client's update of this round was already accepted",
    )


def test_every_reason_has_a_case() -> None:
    assert {reason for _, reason, _ in CASES.values()} | {"duplicate", "crashed"} == set(get_args(Reason))


def test_the_first_problem_is_reported() -> None:
    """Each payload has the faults of its own line and of all lines below it."""
    wrong_shape_and_nan = {"fc.bias": np.full(3, np.nan, np.float32), "fc.weight": HONEST.delta["fc.weight"]}
    dtype_too = {**wrong_shape_and_nan, "fc.bias": np.full(3, np.nan)}
    names_too = {"fc.bias": dtype_too["fc.bias"], "head": HONEST.delta["fc.weight"]}
    order = [
        refused(b"\xff" * (EXPECTED.payload_limit_bytes + 1)),
        refused(b"\xff" * 99),
        refused(sent(task_changes={"base": "c", "round": 1}, num_examples=0, tensors=names_too)),
        refused(sent(task_changes={"round": 1}, num_examples=0, tensors=names_too)),
        refused(sent(num_examples=0, tensors=names_too)),
        refused(sent(num_examples=1001, tensors=names_too)),
        refused(sent(tensors=names_too)),
        refused(sent(tensors=dtype_too)),
        refused(sent(tensors=wrong_shape_and_nan)),
        refused(sent(tensors=honest_delta(fc_weight=NAN))),
    ]  # fmt: skip
    assert [reason for reason, _ in order] == [
        "oversized", "malformed", "stale_base", "wrong_task", "no_examples",
        "too_many_examples", "misnamed_tensor", "wrong_dtype", "wrong_shape", "non_finite",
    ]  # fmt: skip


def test_tensors_that_share_their_bytes_are_malformed() -> None:
    """Names, dtypes and shapes are as asked for; only the offsets lie."""
    header, data = parsed(sent())
    header["delta/fc.bias"] = entry(0, 8, [2])
    header["delta/fc.weight"] = entry(0, 24, [2, 3])
    reason, words = refused(raw(header, data))
    assert (reason, "lies at [0, 24], expected [8, 32]" in words) == ("malformed", True)


def test_a_header_that_only_the_loader_refuses_is_malformed() -> None:
    header, data = parsed(sent())
    header["__metadata__"]["note"] = 3
    assert refused(raw(header, data))[0] == "malformed"


def test_words_stay_short_however_much_was_sent() -> None:
    many = intake.make_expected({"w": np.zeros(1_000_000, np.float32)}, {})
    shouted = sent(tensors=honest_delta(**{"x" * 1_000_000: np.zeros(1, np.float32)}))
    verdict = check(shouted, expected=many)
    assert isinstance(verdict, Rejection)
    assert verdict.reason == "misnamed_tensor"
    assert len(verdict.message) < 600


@pytest.mark.parametrize("count", [2**53 + 1, 10**400])
def test_a_count_that_arithmetic_does_not_hold_is_malformed(count: int) -> None:
    assert refused(sent(num_examples=count))[0] == "malformed"


@pytest.mark.parametrize(
    "kind",
    ["nan", "wrong_shape", "wrong_dtype", "missing_tensor", "extra_tensor", "stale_base", "no_examples"],
)
def test_each_simulated_fault_is_refused_for_its_own_reason(kind: str) -> None:
    (payload,) = faults.encode_uploads(kind, TASK.message, HONEST)
    assert refused(payload)[0] == {"nan": "non_finite"}.get(kind, kind)


def test_the_duplicate_fault_sends_the_same_update_twice() -> None:
    first, second = faults.encode_uploads("duplicate", TASK.message, HONEST)
    assert first == second
    assert isinstance(check(first), Update)


def test_the_limit_leaves_room_for_any_honest_header() -> None:
    """Three thousand tensors of long names and one element each: nearly all header."""
    many: Params = {f"{'block.' * 20}{i}.weight": np.zeros((1, 1, 1, 1), np.float32) for i in range(3000)}
    payload = encode_result(TASK.message, update(many, num_examples=2**53))
    assert isinstance(check(payload, expected=intake.make_expected(many, {})), Update)


# On disk


def on_disk(payload: bytes, folder: Path) -> FilePayload:
    folder.mkdir(exist_ok=True)
    (folder / "upload").write_bytes(payload)
    return FilePayload(folder / "upload")


def test_a_payload_on_disk_is_refused_for_what_it_would_be_refused_for_in_memory(tmp_path: Path) -> None:
    for payload, reason, words in CASES.values():
        assert reported(intake.check(on_disk(payload, tmp_path), TASK, EXPECTED)) == (reason, words)


def test_an_update_on_disk_stays_there_and_says_the_same(tmp_path: Path) -> None:
    streams = {"control": HONEST.delta}
    payload = on_disk(encode_result(TASK.message, replace(HONEST, extras=streams)), tmp_path)
    checked = intake.check(payload, TASK, intake.make_expected(MODEL, streams))
    assert isinstance(checked, Update)
    for got in (checked, intake.read_accepted(payload)):
        assert isinstance(got.delta, LazyTensors)
        assert (got.num_examples, got.num_steps, got.train_loss) == (10, 3, HONEST.train_loss)
        for tensors in (got.delta, got.extras["control"]):
            assert {name: value.tobytes() for name, value in tensors.items()} == {
                name: value.tobytes() for name, value in HONEST.delta.items()
            }


def test_a_bad_number_in_the_last_piece_of_a_large_tensor_is_found(tmp_path: Path) -> None:
    large: Params = {"w": np.zeros(2 * PIECE + 1, np.float32)}
    expected = intake.make_expected(large, {})
    assert isinstance(intake.check(on_disk(sent(tensors=large), tmp_path), TASK, expected), Update)
    large["w"][-1] = np.inf
    assert reported(intake.check(on_disk(sent(tensors=large), tmp_path), TASK, expected))[0] == "non_finite"


def of_dtype(dtype: str, numbers: list[float]) -> tuple[bytes, Expected]:
    """An update whose `fc.bias` is of this dtype, and a task that asks for it."""
    header, _ = parsed(encode_result(TASK.message, update({"fc.bias": np.zeros(len(numbers), np.float32)})))
    if dtype == "BF16":
        data = (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = np.array(numbers, arrays.DTYPES[dtype]).tobytes()
    header["delta/fc.bias"] = entry(0, len(data), [len(numbers)], dtype)
    requested = intake.make_expected(
        {"fc.bias": np.zeros(len(numbers), np.float32)}, {}, dtypes={"delta/fc.bias": dtype}
    )
    return raw(header, data), requested


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("dtype", intake.FOLDABLE)
def test_a_task_may_ask_for_another_dtype_and_its_numbers_are_folded_in_float64(
    dtype: str, stored: bool, tmp_path: Path
) -> None:
    first, second = [1.0, 100.0, 0.0], [2.0, 127.0, 3.0]
    strategy = presets.get("fedavg", weighting="uniform")
    fold = strategy.start(2)
    for position, numbers in enumerate((first, second)):
        payload, requested = of_dtype(dtype, numbers)
        checked = (
            intake.check(on_disk(payload, tmp_path / str(position)), TASK, requested)
            if stored
            else check(payload, expected=requested)
        )
        assert isinstance(checked, Update)
        assert checked.norm == pytest.approx(np.linalg.norm(numbers), rel=1e-12)
        fold.add(position, strategy.transform(checked))
    mean = fold.finish().delta["fc.bias"]
    assert (mean.dtype, mean.tolist()) == (np.float64, [1.5, 113.5, 1.5])


def test_an_update_is_refused_if_its_dtype_is_not_the_requested_one() -> None:
    payload, requested = of_dtype("F16", [1.0, 2.0])
    requested_bytes = of_dtype("I8", [1.0, 2.0])[1]
    assert reported(check(payload, expected=requested_bytes)) == (
        "wrong_dtype",
        "delta/fc.bias is F16, expected I8",
    )
    plain = of_dtype("F32", [1.0, 2.0])[0]
    assert reported(check(plain, expected=requested)) == ("wrong_dtype", "delta/fc.bias is F32, expected F16")


def test_a_number_that_is_not_finite_is_refused_in_any_dtype() -> None:
    for dtype in ("F16", "BF16", "F64"):
        payload, requested = of_dtype(dtype, [1.0, np.inf])
        assert reported(check(payload, expected=requested))[0] == "non_finite"


def test_the_limit_of_the_size_follows_the_dtype() -> None:
    limits = [of_dtype(dtype, [0.0] * 1000)[1].payload_limit_bytes for dtype in ("I8", "F16", "F32", "F64")]
    assert [limit - limits[0] for limit in limits] == [0, 1000, 3000, 7000]


@pytest.mark.parametrize("dtype", ["BOOL", "I64", "F8_E4M3"])
def test_a_task_cannot_ask_for_a_dtype_that_cannot_be_folded(dtype: str) -> None:
    with pytest.raises(
        ValueError, match=f"delta/fc.bias is to be {dtype}, which cannot be folded: sums are float64"
    ):
        intake.make_expected(MODEL, {}, dtypes={"delta/fc.bias": dtype})
    with pytest.raises(ValueError, match="is no tensor of this task"):
        intake.make_expected(MODEL, {}, dtypes={"delta/head": "F16"})


def test_a_narrower_model_is_expected_as_if_it_were_the_model() -> None:
    whole = {"fc.weight": np.zeros((10, 64), np.float32), "fc.bias": np.zeros(10, np.float32)}
    part = {"fc.weight": np.zeros((10, 16), np.float32), "fc.bias": np.zeros(10, np.float32)}
    expected = intake.make_expected(whole, {}, max_examples=9, weight_limit=5)
    shapes = {name: value.shape for name, value in part.items()} | {"frozen": (3,)}
    narrower = intake.narrow(expected, shapes)
    assert narrower == intake.make_expected(part, {}, max_examples=9, weight_limit=5)


def test_a_reason_is_found_by_its_code() -> None:
    assert [intake.parse_reason(code) for code in get_args(Reason)] == list(get_args(Reason))
    for unknown in ("because", "", None):
        with pytest.raises(ValueError, match="is no reason"):
            intake.parse_reason(unknown)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
models = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    npst.arrays(
        np.float32, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), elements=finite
    ),
    min_size=1,
    max_size=4,
)


@given(
    models,
    st.booleans(),
    st.integers(1, 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_an_honest_update_is_accepted_as_it_was_sent(
    delta: Params, with_stream: bool, num_examples: int, train_loss: float
) -> None:
    num_steps = -(-num_examples // TASK.message.batch_size)
    streams = {"control": delta} if with_stream else {}
    payload = encode_result(TASK.message, Update(delta, num_examples, num_steps, train_loss, streams))
    got = check(payload, expected=intake.make_expected(delta, streams))
    assert isinstance(got, Update)
    assert (got.num_examples, got.num_steps, got.train_loss) == (num_examples, num_steps, train_loss)
    assert got.extras.keys() == streams.keys()
    for tensors in (got.delta, *got.extras.values()):
        assert {name: (v.shape, v.tobytes()) for name, v in tensors.items()} == {
            name: (v.shape, v.tobytes()) for name, v in delta.items()
        }


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(payload: bytes) -> None:
    assert isinstance(check(payload), Rejection)


@given(st.data())
def test_a_damaged_update_never_raises(data: st.DataObject) -> None:
    """Bytes of the header only: damage among the numbers gives other numbers, which no one can tell."""
    payload = bytearray(sent())
    header = int.from_bytes(payload[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, 7 + header))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    assert isinstance(check(bytes(payload)), Update | Rejection)
    assert isinstance(check(bytes(payload[:cut])), Update | Rejection)


@given(
    st.dictionaries(
        st.sampled_from(["round", "client", "base", "num_examples", "num_steps", "train_loss", "other"]),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.none()),
    )
)
def test_arbitrary_words_of_a_client_never_raise(metadata: dict[str, Any]) -> None:
    honest = arrays.read_header(sent()).values
    tensors = {f"delta/{name}": value for name, value in HONEST.delta.items()}
    assert isinstance(check(arrays.encode(tensors, {**honest, **metadata})), Update | Rejection)
