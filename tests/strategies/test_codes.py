"""Codes: laws, the papers' bounds, a naive twin of each, and hostile bytes."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.codes import known
from strategies.codes.code import Code, decode, encode, most_bytes
from strategies.codes.compression import Compression
from strategies.codes.eden import LEVELS
from strategies.codes.packing import BadCode, rice_bits
from strategies.codes.vectors import Shapes, count, join
from strategies.option_check import OptionError
from strategies.params import NotFinite, Params
from strategies.update import Update

CODES: list[tuple[str, dict[str, Any]]] = [
    ("topk", {"share": 0.1}),
    ("topk", {"share": 0.1, "bits": 8}),
    ("topk", {"share": 0.1, "bits": 4}),
    ("topk", {"share": 0.1, "bits": 1}),
    ("qsgd", {"bits": 8}),
    ("qsgd", {"bits": 4}),
    ("qsgd", {"bits": 2}),
    ("sign", {}),
    ("drive", {}),
    ("drive", {"share": 0.1}),
    ("eden", {"bits": 2}),
    ("eden", {"bits": 4}),
    ("powersgd", {"rank": 1}),
]
EACH = pytest.mark.parametrize(
    "code",
    [known.get(name, **options) for name, options in CODES],
    ids=[" ".join([name, *map(str, options.values())]) for name, options in CODES],
)
SHAPES: Shapes = {"bias": (7,), "conv": (3, 2, 2, 2), "empty": (0, 3), "fc": (40, 30), "scale": ()}


def normal(shapes: Shapes = SHAPES, seed: int = 0, scale: float = 0.1) -> Params:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(0, scale, shape), np.float32) for name, shape in shapes.items()}


def passed(code: Code, delta: Params, seed: int = 1) -> Params:
    return decode(code, encode(code, delta, np.random.default_rng(seed)), shapes_of(delta))


def shapes_of(delta: Params) -> Shapes:
    return {name: value.shape for name, value in delta.items()}


def squared(delta: Mapping[str, np.ndarray]) -> float:
    return float(sum(np.square(value, dtype=np.float64).sum() for value in delta.values()))


def error(delta: Params, got: Params) -> float:
    """The squared norm of the error beside that of the update."""
    return squared({name: delta[name] - got[name] for name in delta}) / squared(delta)


# -- laws --


@EACH
@given(
    sizes=st.lists(st.integers(0, 40), max_size=3),
    seed=st.integers(0, 99),
    scale=st.sampled_from((1e-30, 1, 1e30)),
)
@settings(max_examples=25, deadline=None)
def test_tensors_keep_names_and_shapes_within_the_stated_bytes(
    code: Code, sizes: list[int], seed: int, scale: float
) -> None:
    delta = normal({"a": (9,), "b": tuple(sizes)}, seed, scale)
    content = encode(code, delta, np.random.default_rng(seed))
    got = decode(code, content, shapes_of(delta))
    assert shapes_of(got) == shapes_of(delta) and list(got) == ["a", "b"]
    assert all(value.dtype == np.float32 and np.isfinite(value).all() for value in got.values())
    assert len(content) <= most_bytes(code, shapes_of(delta))


@EACH
def test_an_update_of_zeros_stays_one(code: Code) -> None:
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    assert squared(passed(code, zeros)) == 0


@EACH
def test_the_same_seed_writes_the_same_bytes(code: Code) -> None:
    first, second = (encode(code, normal(), np.random.default_rng(3)) for _ in range(2))
    assert first == second


@EACH
def test_a_code_travels_with_its_options(code: Code) -> None:
    assert known.from_options(known.to_options(code)) == code


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_right_on_average(bits: int) -> None:
    delta = normal({"w": (600,)})
    tries, code = 400, known.get("qsgd", bits=bits)
    total = np.sum([passed(code, delta, seed)["w"] for seed in range(tries)], axis=0, dtype=np.float64)
    # A value lies between two levels, so its variance is at most a quarter of the squared step; five deviations.
    step = np.abs(delta["w"]).max() / (2 ** (bits - 1) - 1)
    assert np.abs(total / tries - delta["w"]).max() < 5 * step / 2 / math.sqrt(tries)


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    [("drive", {}, 0.571), ("drive", {"share": 0.1}, 1.31), ("eden", {"bits": 2}, 0.133)],
)
def test_rotation_codes_are_right_on_average_over_dense_updates(
    name: str, options: dict[str, Any], bound: float
) -> None:
    delta, tries, code = normal({"w": (256,)}), 400, known.get(name, **options)
    total = np.sum([passed(code, delta, seed)["w"] for seed in range(tries)], axis=0, dtype=np.float64)
    # A draw's squared error is `bound` on average; that of the mean of independent ones is less by the number of draws.
    assert error(delta, {"w": np.asarray(total / tries)}) < 1.5 * bound / tries


def test_a_tensor_in_parts_is_written_as_a_whole_one() -> None:
    """Top-k, QSGD and the rotations look at all values, whatever tensors they are in."""
    values = normal({"w": (100,)})["w"]
    for name in ("topk", "qsgd", "drive", "eden"):
        code = known.get(name)
        parted = passed(code, {"a": values[:30], "b": values[30:].reshape(7, 10)})
        assert np.array_equal(join(parted), passed(code, {"w": values})["w"])


# -- the papers' bounds --


@given(seed=st.integers(0, 999), share=st.sampled_from((0.001, 0.05, 0.5, 1.0)))
@settings(max_examples=30, deadline=None)
def test_topk_leaves_at_most_the_share_that_it_does_not_send(seed: int, share: float) -> None:
    delta = normal(seed=seed)
    sent = math.ceil(share * count(SHAPES))
    assert error(delta, passed(known.get("topk", share=share), delta)) <= 1 - sent / count(SHAPES) + 1e-9


@given(seed=st.integers(0, 999), bits=st.sampled_from((2, 4, 8)))
@settings(max_examples=30, deadline=None)
def test_qsgd_is_off_by_less_than_a_level(seed: int, bits: int) -> None:
    delta = normal({"w": (512,)}, seed)
    step = np.abs(delta["w"]).max() / (2 ** (bits - 1) - 1)
    assert np.abs(passed(known.get("qsgd", bits=bits), delta)["w"] - delta["w"]).max() <= step * (1 + 1e-5)


@given(seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_sign_leaves_what_the_density_of_a_tensor_says(seed: int) -> None:
    p = normal({"w": (64,)}, seed)
    values = p["w"].astype(np.float64)
    density = np.abs(values).sum() ** 2 / (64 * np.square(values).sum())
    assert error(p, passed(known.get("sign"), p)) == pytest.approx(1 - density, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "bound"),
    # π/2 - 1 (Vargaftik 2021, Theorem 4), and 1/(1 - D) - 1 with the distortion D of Lloyd's levels.
    # A share p of a normal distribution, the part above t, has (2 φ(t))² / p of its squared norm in its signs.
    [
        ("drive", {}, math.pi / 2 - 1),
        ("drive", {"share": 0.2}, 0.63),
        ("drive", {"share": 0.028}, 4.5),
        ("eden", {"bits": 2}, 0.1331),
        ("eden", {"bits": 4}, 0.0096),
    ],
)
def test_rotation_codes_have_the_error_of_a_normal_distribution_whatever_the_update(
    name: str, options: dict[str, Any], bound: float
) -> None:
    spiky = {"w": np.exp(normal({"w": (8192 + 600,)}, scale=2)["w"])}
    assert error(spiky, passed(known.get(name, **options), spiky)) == pytest.approx(bound, rel=0.06)


@pytest.mark.parametrize("bits", [2, 4])
def test_levels_of_eden_are_the_means_of_what_is_nearest_to_them(bits: int) -> None:
    levels = LEVELS[bits].astype(np.float64)
    edges = [-math.inf, *(levels[1:] + levels[:-1]) / 2, math.inf]
    for level, low, high in zip(levels, edges, edges[1:], strict=False):
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        mean = (math.exp(-(low**2) / 2) - math.exp(-(high**2) / 2)) / math.sqrt(2 * math.pi) / mass
        assert level == pytest.approx(mean, abs=1e-6)


def test_powersgd_sends_a_matrix_of_its_rank_as_it_is() -> None:
    rng = np.random.default_rng(0)
    matrix = (rng.normal(size=(30, 2)) @ rng.normal(size=(2, 40))).astype(np.float32)
    assert error({"w": matrix}, passed(known.get("powersgd", rank=2), {"w": matrix})) < 1e-10
    assert error({"w": matrix}, passed(known.get("powersgd", rank=1), {"w": matrix})) < 1


# -- error feedback --


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("topk", {"share": 0.05}),
        ("topk", {"share": 0.05, "bits": 4}),
        ("topk", {"share": 0.05, "bits": 1}),
        ("sign", {}),
        ("powersgd", {}),
    ],
)
def test_what_was_sent_and_what_is_kept_add_up_to_what_was_learnt(name: str, options: dict[str, Any]) -> None:
    code = known.get(name, **options)
    state: Mapping[str, Params] = {}
    sent: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    learnt: dict[str, Any] = dict.fromkeys(SHAPES, 0.0)
    for number in range(20):
        delta = normal(seed=number)
        update, state = Compression(code, number).apply(Update(delta, 1, 1, 0.0), state)
        assert update.encoded is not None
        got = decode(code, update.encoded, SHAPES)
        for key in SHAPES:
            assert np.array_equal(got[key], update.delta[key])
            sent[key], learnt[key] = (
                sent[key] + got[key].astype(float),
                learnt[key] + delta[key].astype(float),
            )
    for key in SHAPES:
        np.testing.assert_allclose(sent[key] + state["residual"][key], learnt[key], atol=1e-5)


@pytest.mark.parametrize("name", ["qsgd", "drive", "eden"])
def test_codes_that_are_right_on_average_keep_nothing(name: str) -> None:
    _, state = Compression(known.get(name), 0).apply(Update(normal(), 1, 1, 0.0), {})
    assert state == {}


@EACH
@pytest.mark.parametrize("value", [math.nan, math.inf, 3.4e38])
def test_an_update_that_is_not_finite_says_so(code: Code, value: float) -> None:
    delta = normal()
    delta["fc"][:] = value
    update, state = Compression(code, 0).apply(Update(delta, 1, 1, 0.0), {})
    assert update.encoded is not None
    if len(update.encoded) == 4:
        assert state == {} and not np.isfinite(join(update.delta)).all()
        with pytest.raises(NotFinite):
            decode(code, update.encoded, SHAPES)
    else:  # the largest numbers fit into some codes
        assert value == 3.4e38 and np.isfinite(join(update.delta)).all()


# -- naive twins, which share nothing with the codes but the description of the bytes --


def twin_topk(delta: Params, content: bytes, k: int) -> list[float]:
    values = [float(each) for name in sorted(delta) for each in delta[name].reshape(-1)]
    chosen = sorted(sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))[:k])
    # The bytes, bit by bit.
    (length,) = struct.unpack_from("<I", content, 4)
    unary = [content[8 + at // 8] >> at % 8 & 1 for at in range(8 * length)]
    low_bits = rice_bits(len(values), k)
    low = [content[8 + length + at // 8] >> at % 8 & 1 for at in range(k * low_bits)]
    position, at, read = -1, 0, []
    for index in range(k):
        high = 0
        while not unary[at]:
            high, at = high + 1, at + 1
        at += 1
        gap = (high << low_bits) + sum(low[index * low_bits + bit] << bit for bit in range(low_bits))
        position += gap + 1
        read.append(position)
    assert read == chosen
    sent = struct.unpack_from(f"<{k}f", content, 8 + length + -(-k * low_bits // 8))
    return [sent[read.index(at)] if at in read else 0.0 for at in range(len(values))]


def test_topk_equals_its_twin() -> None:
    delta = normal()
    code, total = known.get("topk", share=0.03), count(SHAPES)
    content = encode(code, delta, np.random.default_rng(0))
    expected = twin_topk(delta, content, math.ceil(0.03 * total))
    assert np.array_equal(join(decode(code, content, SHAPES)), np.array(expected, np.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_equals_its_twin(bits: int) -> None:
    delta = normal()
    values = [float(each) for each in join(delta)]
    chances = np.random.default_rng(5).random((-(-len(values) // 512), 512)).reshape(-1)
    levels = 2 ** (bits - 1) - 1
    expected = []
    for at, value in enumerate(values):
        bucket = values[at // 512 * 512 : at // 512 * 512 + 512]
        scale = max(map(abs, bucket))
        exact = abs(value) / scale * levels
        level = math.floor(exact) + (chances[at] >= 1 - (exact - math.floor(exact)))
        expected.append(math.copysign(level * scale / levels, value))
    np.testing.assert_allclose(
        join(passed(known.get("qsgd", bits=bits), delta, 5)), expected, rtol=1e-6, atol=1e-9
    )


def test_topk_then_bits_equals_qsgd_of_what_topk_sends() -> None:
    delta = normal()
    sent = join(passed(known.get("topk", share=0.1), delta))
    both = join(passed(known.get("topk", share=0.1, bits=4), delta, 5))
    chosen = np.flatnonzero(sent)
    expected = passed(known.get("qsgd", bits=4), {"w": sent[chosen]}, 5)["w"]
    assert np.array_equal(both[chosen], expected)
    assert not np.delete(both, chosen).any()


def test_topk_with_a_bit_sends_signs_and_the_mean_of_what_it_chooses() -> None:
    delta = normal()
    exact = join(passed(known.get("topk", share=0.03), delta))
    got = join(passed(known.get("topk", share=0.03, bits=1), delta))
    mean = np.abs(exact[exact != 0]).mean(dtype=np.float64)
    np.testing.assert_allclose(got, np.sign(exact) * mean, rtol=1e-6)


@pytest.mark.parametrize("size", [128, 50])
def test_drive_of_a_share_equals_its_twin(size: int) -> None:
    code, delta = known.get("drive", share=0.1), normal({"w": (size,)})
    content = encode(code, delta, np.random.default_rng(2))
    block = 128 if size == 128 else 64
    rotation = twin_rotation(block, int.from_bytes(content[4:12], "little"))
    rotated = rotation @ np.concatenate([delta["w"].astype(np.float64), np.zeros(block - size)])
    sent = sorted(range(block), key=lambda at: -abs(rotated[at]))[: math.ceil(0.1 * block)]
    signs = np.array([math.copysign(1, rotated[at]) if at in sent else 0.0 for at in range(block)])
    expected = rotation.T @ (signs * (rotated @ rotated) / (rotated @ signs))
    np.testing.assert_allclose(decode(code, content, {"w": (size,)})["w"], expected[:size], atol=1e-6)


def test_sign_equals_its_twin() -> None:
    delta = normal()
    got = passed(known.get("sign"), delta)
    for name, value in delta.items():
        scale = sum(abs(float(each)) for each in value.reshape(-1)) / max(1, value.size)
        expected = [scale if each >= 0 else -scale for each in value.reshape(-1)]
        np.testing.assert_allclose(got[name].reshape(-1), np.array(expected).reshape(-1), rtol=1e-6)


def twin_rotation(size: int, seed: int) -> Any:
    """The matrix of a block that is alone, built by the definition."""
    hadamard = np.array(
        [[(-1) ** bin(row & column).count("1") for column in range(size)] for row in range(size)]
    )
    words = [int(each) for each in np.random.PCG64(seed).random_raw(-(-size // 64))]
    signs = [1 - 2 * (words[at // 64] >> at % 64 & 1) for at in range(size)]
    return hadamard * np.array(signs) / math.sqrt(size)


@pytest.mark.parametrize(("name", "options"), [("drive", {}), ("eden", {"bits": 2}), ("eden", {"bits": 4})])
@pytest.mark.parametrize("size", [128, 50])
def test_rotation_codes_equal_their_twin(name: str, options: dict[str, Any], size: int) -> None:
    code, delta = known.get(name, **options), normal({"w": (size,)})
    content = encode(code, delta, np.random.default_rng(2))
    block = 128 if size == 128 else 64
    rotation = twin_rotation(block, int.from_bytes(content[4:12], "little"))
    padded = np.concatenate([delta["w"].astype(np.float64), np.zeros(block - size)])
    rotated = rotation @ padded
    levels = np.array([-1.0, 1.0]) if name == "drive" else LEVELS[options["bits"]].astype(np.float64)
    normed = rotated / math.sqrt(np.mean(rotated**2))
    nearest = np.array([min(levels, key=lambda level: abs(level - each)) for each in normed])
    expected = rotation.T @ (nearest * (rotated @ rotated) / (rotated @ nearest))
    np.testing.assert_allclose(decode(code, content, {"w": (size,)})["w"], expected[:size], atol=1e-6)


def test_powersgd_equals_its_twin() -> None:
    delta = normal()
    got = passed(known.get("powersgd", rank=2), delta, 4)
    rng = np.random.default_rng(4)
    for name in ("conv", "fc"):
        matrix = delta[name].reshape(delta[name].shape[0], -1).astype(np.float64)
        if 2 * sum(matrix.shape) >= matrix.size:
            assert np.array_equal(got[name], delta[name])
            continue
        right = rng.standard_normal((matrix.shape[1], 2))
        for _ in range(2):
            left = matrix @ right
            left[:, 0] /= np.linalg.norm(left[:, 0])  # Gram and Schmidt
            left[:, 1] -= (left[:, 0] @ left[:, 1]) * left[:, 0]
            left[:, 1] /= np.linalg.norm(left[:, 1])
            right = matrix.T @ left
        np.testing.assert_allclose(got[name].reshape(matrix.shape), left @ right.T, atol=1e-6)
    assert np.array_equal(got["bias"], delta["bias"])


# -- hostile bytes --


@EACH
def test_bytes_that_are_cut_or_continued_are_refused(code: Code) -> None:
    content = encode(code, normal(), np.random.default_rng(0))
    for end in {*range(min(60, len(content))), *range(60, len(content), 97), len(content) - 1}:
        with pytest.raises(BadCode):
            decode(code, content[:end], SHAPES)
    with pytest.raises(BadCode, match="follow"):
        decode(code, content + b"\0", SHAPES)


@EACH
@pytest.mark.parametrize(("at", "value"), [(0, 2), (1, 77), (2, 99), (3, 2), (3, 255)])
def test_another_version_code_parameter_or_flag_is_refused(code: Code, at: int, value: int) -> None:
    content = bytearray(encode(code, normal(), np.random.default_rng(0)))
    content[at] = value
    with pytest.raises(BadCode):
        decode(code, bytes(content), SHAPES)


@EACH
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_bytes_are_refused_or_stand_for_finite_tensors(code: Code, data: st.DataObject) -> None:
    content = bytearray(encode(code, normal(), np.random.default_rng(0)))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(4, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode(code, bytes(content), SHAPES)
    except (BadCode, NotFinite):
        return
    assert shapes_of(got) == dict(SHAPES)
    assert np.isfinite(join(got)).all()


@EACH
@given(body=st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_made_up_bytes_are_refused_or_stand_for_finite_tensors(code: Code, body: bytes) -> None:
    head = encode(code, normal(), np.random.default_rng(0))[:4]
    try:
        got = decode(code, head + body, {"w": (20, 5)})
    except (BadCode, NotFinite):
        return
    assert np.isfinite(join(got)).all()


def test_positions_outside_the_model_are_refused() -> None:
    code, shapes = known.get("topk", share=0.01), {"w": (1000,)}
    content = bytearray(encode(code, {"w": np.arange(1000, dtype=np.float32)}, np.random.default_rng(0)))
    low_bits = rice_bits(1000, 10)
    assert low_bits == 6
    (length,) = struct.unpack_from("<I", content, 4)
    content[8 + length : 8 + length + 8] = b"\xff" * 7 + b"\x0f"  # every low part is as large as can be
    with pytest.raises(BadCode, match="position"):
        decode(code, bytes(content), shapes)


@pytest.mark.parametrize("length", [2**32 - 1, 10_000, 0])
def test_a_wrong_length_of_the_positions_is_refused(length: int) -> None:
    code = known.get("topk", share=0.01)
    content = encode(code, normal(), np.random.default_rng(0))
    forged = content[:4] + struct.pack("<I", length) + content[8:]
    with pytest.raises(BadCode):
        decode(code, forged, SHAPES)


def test_too_few_or_too_many_positions_are_refused() -> None:
    code = known.get("topk", share=0.01)
    content = bytearray(encode(code, normal(), np.random.default_rng(0)))
    content[8] ^= 1
    with pytest.raises(BadCode, match="positions"):
        decode(code, bytes(content), SHAPES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize(("name", "at"), [("qsgd", 4), ("sign", 4), ("drive", 12), ("eden", 12)])
def test_a_scale_that_is_no_magnitude_is_refused(name: str, at: int, value: float) -> None:
    code = known.get(name)
    content = bytearray(encode(code, normal(), np.random.default_rng(0)))
    content[at : at + 4] = struct.pack("<f", value)
    with pytest.raises(BadCode, match="scale"):
        decode(code, bytes(content), SHAPES)


def test_a_level_that_does_not_exist_is_refused() -> None:
    code = known.get("qsgd", bits=4)
    content = bytearray(encode(code, normal({"w": (10,)}), np.random.default_rng(0)))
    content[-1] = 0xFF
    with pytest.raises(BadCode, match="level of 15, expected 14"):
        decode(code, bytes(content), {"w": (10,)})


@EACH
def test_decoding_takes_a_few_models_of_memory_whatever_the_bytes(code: Code) -> None:
    shapes = {"w": (300, 1000)}
    content = encode(code, normal(shapes), np.random.default_rng(0))
    limit = most_bytes(code, shapes)
    for forged in (content, content[:4] + b"\xff" * (limit - 4), content[:4] + b"\0" * (limit - 4)):
        tracemalloc.start()
        try:
            decode(code, forged, shapes)
        except (BadCode, NotFinite):
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 12 * 4 * count(shapes)


# -- options --


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("topk", {"share": 0.0}, "share = 0.0 is not allowed for topk: expected > 0 and <= 1"),
        ("topk", {"share": 1.5}, "share = 1.5"),
        ("topk", {"bits": 2}, "expected one of 1, 4, 8, 32"),
        ("qsgd", {"bits": 3}, "expected one of 2, 4, 8"),
        ("sign", {"bits": 1}, "sign has no option 'bits'; known: none"),
        ("powersgd", {"rank": 0}, "rank = 0"),
        ("powersgd", {"rank": 1.5}, "rank = 1.5"),
        ("gzip", {}, "code 'gzip' is unknown"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words.replace("(", "\\(")):
        known.get(name, **options)


def test_the_update_keeps_its_figures() -> None:
    update = Update(normal(), 12, 3, 0.5)
    sent, _ = Compression(known.get("drive"), 0).apply(update, {})
    assert replace(sent, delta=update.delta, encoded=None) == update
