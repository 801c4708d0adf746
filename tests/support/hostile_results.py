"""Results that no honest device sends, each with the codes it may be refused with.

A case makes its bytes from the sound result of a task (`Sound`), so that nothing is wrong with it but what its name
says. The corpus is the same each time: nothing here is random but what a seed makes.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.wire import arrays
from edge_client.wire.arrays import encode_result
from edge_client.wire.device import TaskMessage
from strategies.params import Params
from strategies.update import Update
from tests.support.federation import steps_of
from tests.support.payloads import parsed, raw

TENSORS = {"fc.bias": (3,), "fc.weight": (3, 4)}
"""The model under attack: logreg of four features and three classes."""

MALFORMED = frozenset({"malformed"})


@dataclass(frozen=True)
class Sound:
    """A good result, and whose it is not."""

    task: TaskMessage
    payload: bytes
    other_device: str
    canary: Path

    @property
    def values(self) -> dict[str, Any]:
        return arrays.read_header(self.payload).values

    @property
    def tensors(self) -> Params:
        return arrays.decode(self.payload)

    def having(self, tensors: Mapping[str, Any], values: Any = None) -> bytes:
        """Other tensors, or another header, encoded as a good result is."""
        return arrays.encode(tensors, self.values if values is None else values)

    def saying(self, **changed: Any) -> bytes:
        """The good result with a header that says something else; `...` leaves a key out."""
        message = {key: value for key, value in {**self.values, **changed}.items() if value is not ...}
        return self.having(self.tensors, message)

    def metadata(self, metadata: Any) -> bytes:
        head, data = parsed(self.payload)
        return raw({**head, "__metadata__": metadata}, data)

    def entry(self, name: str, **changed: Any) -> bytes:
        """The good result with another entry of one tensor; `...` leaves a key out."""
        head, data = parsed(self.payload)
        changed = {key: value for key, value in {**head[name], **changed}.items() if value is not ...}
        return raw({**head, name: changed}, data)


@dataclass(frozen=True)
class BadResult:
    """`make` gives what is sent; `codes`: any of these may refuse it."""

    name: str
    codes: frozenset[str]
    make: Callable[[Sound], bytes]


def sound_result(task: TaskMessage, other_device: str, canary: Path, seed: int = 1) -> Sound:
    rng = np.random.default_rng(seed)
    delta = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in TENSORS.items()}
    update = Update(delta, 10, steps_of(task, 10), 0.5)
    return Sound(task, encode_result(task, update), other_device, canary)


def bad_results() -> list[BadResult]:
    """All of them, always the same and in the same order."""
    groups = (
        _cut,
        _header_lengths,
        _headers,
        _offsets,
        _shapes,
        _dtypes,
        _entries,
        _not_finite,
        _counts,
        _identities,
        _tensor_sets,
        _names,
        _other_formats,
    )
    return [case for group in groups for case in group()]


def _case(name: str, codes: str, make: Callable[[Sound], bytes]) -> BadResult:
    return BadResult(name, frozenset(codes.split()), make)


def _cut() -> Iterator[BadResult]:
    for place in (1, 4, 7, 8, 9, 50, 100, 200, 300):
        yield _case(f"cut after {place} bytes", "malformed", lambda good, at=place: good.payload[:at])  # type: ignore[misc]
    for missing in (1, 4, 13, 48, 60):
        yield _case(f"last {missing} bytes missing", "malformed", lambda good, n=missing: good.payload[:-n])  # type: ignore[misc]
    for more in (1, 4, 4096):
        yield _case(
            f"{more} bytes too many",
            "malformed",
            lambda good, n=more: good.payload + bytes(n),  # type: ignore[misc]
        )
    yield _case("twice in a row", "malformed", lambda good: good.payload * 2)
    yield _case("the first byte missing", "malformed", lambda good: good.payload[1:])


def _header_lengths() -> Iterator[BadResult]:
    def lying(good: Sound, change: Callable[[int], int]) -> bytes:
        length = int.from_bytes(good.payload[:8], "little")
        return change(length).to_bytes(8, "little") + good.payload[8:]

    for name, change in {
        "0": lambda length: 0,
        "1": lambda length: 1,
        "half": lambda length: length // 2,
        "8 too few": lambda length: length - 8,
        "1 too many": lambda length: length + 1,
        "8 too many": lambda length: length + 8,
        "all there is": lambda length: length + 60,
        "more than there is": lambda length: length + 61,
        "2^31": lambda length: 2**31,
        "2^32 + the truth": lambda length: 2**32 + length,
        "2^63": lambda length: 2**63,
        "2^64 - 1": lambda length: 2**64 - 1,
    }.items():
        yield _case(f"header length says {name}", "malformed", partial(lying, change=change))
    yield _case(
        "header length in big-endian", "malformed", lambda good: good.payload[7::-1] + good.payload[8:]
    )


def _headers() -> Iterator[BadResult]:
    def instead(good: Sound, head: bytes) -> bytes:
        return raw(head, parsed(good.payload)[1])

    for name, head in {
        "empty": b"",
        "a list": b"[]",
        "a number": b"7",
        "a string": b'"delta"',
        "null": b"null",
        "true": b"true",
        "an unfinished object": b'{"delta/fc.bias": {',
        "not UTF-8": b'{"\xff\xfe": 1}',
        "UTF-16": '{"a": 1}'.encode("utf-16"),
        "NUL bytes": bytes(64),
        "10,000 lists deep": b"[" * 10_000,
        "5,000 objects deep": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        "spaces": b" " * 64,
        "a number of 5,000 digits": b'{"a": ' + b"9" * 5_000 + b"}",
        "XML": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbb">]><a>&b;</a>',
    }.items():
        yield _case(f"header is {name}", "malformed", partial(instead, head=head))
    yield _case("header followed by garbage", "malformed", _garbage_after_the_header)
    yield _case("header with a byte order mark", "malformed", _with_a_byte_order_mark)
    yield _case("a tensor twice in the header", "malformed", _tensor_twice)
    yield _case("the metadata twice in the header", "malformed", _metadata_twice)
    for name, metadata in {
        "a list": [],
        "a string": "fedloop",
        "null": None,
        "with a number": {"fedloop": 7},
        "with an object": {"fedloop": {}},
        "absent": {},
        "under another name": {"fed1oop": "{}"},
        "not JSON": {"fedloop": "{"},
        "a JSON list": {"fedloop": "[]"},
        "a JSON null": {"fedloop": "null"},
        "a JSON number": {"fedloop": "1"},
        "5,000 lists deep": {"fedloop": "[" * 5_000},
        "a number of 5,000 digits": {"fedloop": '{"round": ' + "9" * 5_000 + "}"},
    }.items():
        yield _case(
            f"metadata is {name}",
            "malformed",
            lambda good, metadata=metadata: good.metadata(metadata),  # type: ignore[misc]
        )


def _garbage_after_the_header(good: Sound) -> bytes:
    head, data = parsed(good.payload)
    return raw(json.dumps(head).encode() + b"garbage", data)


def _with_a_byte_order_mark(good: Sound) -> bytes:
    head, data = parsed(good.payload)
    return raw(b"\xef\xbb\xbf" + json.dumps(head).encode(), data)


def _tensor_twice(good: Sound) -> bytes:
    head, data = parsed(good.payload)
    again = json.dumps(head)[:-1] + ', "delta/fc.bias": ' + json.dumps(head["delta/fc.bias"]) + "}"
    return raw(again.encode(), data)


def _metadata_twice(good: Sound) -> bytes:
    head, data = parsed(good.payload)
    again = json.dumps(head)[:-1] + ', "__metadata__": ' + json.dumps(head["__metadata__"]) + "}"
    return raw(again.encode(), data)


def _offsets() -> Iterator[BadResult]:
    # fc.bias lies at [0, 12], fc.weight at [12, 60].
    for name, offsets in {
        "overlap": [0, 48],
        "leave a gap": [16, 64],
        "begin before the data": [-48, 0],
        "are both negative": [-60, -12],
        "run backwards": [60, 12],
        "are empty": [12, 12],
        "go beyond the data": [12, 10**9],
        "are 2^63": [2**63, 2**63 + 48],
        "are 10^30": [10**30, 10**30 + 48],
        "are floats": [12.0, 60.0],
        "are booleans": [True, 60],
        "are strings": ["12", "60"],
        "are NaN": [math.nan, math.nan],
        "are infinite": [12, math.inf],
        "are null": None,
        "are one": [12],
        "are three": [12, 60, 60],
        "are nested": [[12], [60]],
        "are an object": {"0": 12, "1": 60},
    }.items():
        yield _case(
            f"offsets {name}",
            "malformed",
            lambda good, offsets=offsets: good.entry("delta/fc.weight", data_offsets=offsets),  # type: ignore[misc]
        )
    yield _case(
        "the first offset is false",
        "malformed",
        lambda good: good.entry("delta/fc.bias", data_offsets=[False, 12]),
    )
    yield _case(
        "two tensors in the same bytes",
        "malformed",
        lambda good: good.entry("delta/fc.bias", data_offsets=[12, 24]),
    )


def _shapes() -> Iterator[BadResult]:
    for name, shape in {
        "transposed": [4, 3],
        "flat": [12],
        "with one axis more": [1, 3, 4],
        "halved and doubled": [6, 2],
    }.items():
        yield _case(
            f"shape {name}",
            "wrong_shape",
            lambda good, shape=shape: good.entry("delta/fc.weight", shape=shape),  # type: ignore[misc]
        )
    for name, shape in {
        "of 64 axes": [3, 4] + [1] * 62,
        "of 65 axes": [3, 4] + [1] * 63,
        "of 2,000 axes": [3, 4] + [1] * 1998,
        "of 64 huge axes": [2**62] * 64,
        "too large": [3, 5],
        "too small": [3, 3],
        "huge": [2**40, 2**40],
        "beyond 64 bits": [2**64, 4],
        "negative": [-3, -4],
        "half negative": [3, -4],
        "with a zero": [0, 4],
        "empty": [],
        "of floats": [3.0, 4.0],
        "of booleans": [True, 12],
        "of strings": ["3", "4"],
        "a string": "34",
        "null": None,
        "a number": 12,
        "nested": [[3], [4]],
        "an object": {"3": 4},
        "of NaN": [math.nan, 4],
    }.items():
        yield _case(
            f"shape {name}",
            "malformed wrong_shape",
            lambda good, shape=shape: good.entry("delta/fc.weight", shape=shape),  # type: ignore[misc]
        )


def _dtypes() -> Iterator[BadResult]:
    for name in ("I32", "U8", "F64", "F16", "BF16", "BOOL", "I64"):
        yield _case(
            f"says {name} of the same bytes",
            "malformed wrong_dtype",
            lambda good, dtype=name: good.entry("delta/fc.weight", dtype=dtype),  # type: ignore[misc]
        )
    for dtype in ("float64", "float16", "int32", "uint8", "bool"):
        yield _case(
            f"tensors of {dtype}",
            "wrong_dtype",
            lambda good, dtype=dtype: good.having(  # type: ignore[misc]
                {name: value.astype(dtype) for name, value in good.tensors.items()}
            ),
        )
    for shown, dtype in {  # type: ignore[assignment]
        "f32": "f32",
        "object": "object",
        "F32 and a space": "F32 ",
        "F8_E4M3": "F8_E4M3",
        "nothing": "",
        "null": None,
        "a number": 32,
        "a list": ["F32"],
        "an object": {"F32": 1},
        "10,000 letters": "F" * 10_000,
    }.items():
        yield _case(
            f"dtype is {shown}",
            "malformed",
            lambda good, dtype=dtype: good.entry("delta/fc.weight", dtype=dtype),  # type: ignore[misc]
        )


def _entries() -> Iterator[BadResult]:
    for key in ("dtype", "shape", "data_offsets"):
        yield _case(
            f"a tensor without {key}",
            "malformed",
            lambda good, key=key: good.entry("delta/fc.bias", **{key: ...}),  # type: ignore[misc]
        )
    for name, instead in {"null": None, "a list": [], "a string": "F32", "a number": 1, "true": True}.items():

        def make(good: Sound, instead: Any = instead) -> bytes:
            head, data = parsed(good.payload)
            return raw({**head, "delta/fc.bias": instead}, data)

        yield _case(f"a tensor's entry is {name}", "malformed", make)


def _not_finite() -> Iterator[BadResult]:
    for name in TENSORS:
        for shown, bits in {
            "NaN": 0x7FC00000,
            "a signalling NaN": 0x7F800001,
            "+inf": 0x7F800000,
            "-inf": 0xFF800000,
        }.items():
            for place in (0, -1):
                where = "first" if place == 0 else "last"

                def make(good: Sound, name: str = name, bits: int = bits, place: int = place) -> bytes:
                    tensors = good.tensors
                    value = tensors[f"delta/{name}"].copy()
                    value.view(np.uint32).reshape(-1)[place] = bits
                    return good.having({**tensors, f"delta/{name}": value})

                yield _case(f"{shown} {where} in {name}", "non_finite", make)
    for loss in (math.nan, math.inf, -math.inf):
        yield _case(
            f"loss is {loss}",
            "non_finite malformed",
            lambda good, loss=loss: good.saying(train_loss=loss),  # type: ignore[misc]
        )

    def overflowing(good: Sound) -> bytes:
        text = json.dumps({**good.values, "train_loss": 0.5}).replace("0.5", "1e999")
        return good.metadata({"fedloop": text})

    yield _case("loss is 1e999", "non_finite malformed", overflowing)


def _counts() -> Iterator[BadResult]:
    wrong: dict[str, Any] = {
        "negative": -1,
        "beyond what float64 holds": 2**53 + 1,
        "of 400 digits": 10**400,
        "a fraction": 1.5,
        "a whole float": 10.0,
        "true": True,
        "a string": "10",
        "null": None,
        "a list": [10],
        "absent": ...,
        "NaN": math.nan,
    }
    for key in ("num_examples", "num_steps"):
        yield _case(f"{key} is 0", "no_examples", lambda good, key=key: good.saying(**{key: 0}))  # type: ignore[misc]
        for name, value in wrong.items():
            codes = "no_examples" if name == "negative" else "malformed"
            yield _case(f"{key} is {name}", codes, lambda good, k=key, v=value: good.saying(**{k: v}))  # type: ignore[misc]
    for name, steps in {"one more than its examples make": 1, "far too many": 2**50}.items():
        yield _case(
            f"num_steps is {name}",
            "wrong_steps",
            lambda good, more=steps: good.saying(num_steps=good.values["num_steps"] + more),  # type: ignore[misc]
        )
    for name, value in {
        "a string": "0.5",
        "null": None,
        "true": True,
        "a list": [0.5],
        "absent": ...,
        "of 400 digits": 10**400,
    }.items():
        yield _case(f"loss is {name}", "malformed", lambda good, v=value: good.saying(train_loss=v))  # type: ignore[misc]


def _identities() -> Iterator[BadResult]:
    for name, change in {"the next": 1, "the one before": -1, "a far one": 10**9}.items():
        yield _case(
            f"round is {name}",
            "wrong_task",
            lambda good, by=change: good.saying(round=good.task.round + by),  # type: ignore[misc]
        )
    for name, value in {
        "a string": "1",
        "a float": 1.0,
        "true": True,
        "null": None,
        "absent": ...,
        "of 400 digits": 10**400,
    }.items():
        yield _case(f"round is {name}", "malformed", lambda good, v=value: good.saying(round=v))  # type: ignore[misc]
    yield _case(
        "client is another device", "foreign_identity", lambda good: good.saying(client=good.other_device)
    )
    for name, value in {
        "empty": "",
        "in capitals": "UPPER",
        "with a NUL": "a\0b",
        "half a surrogate pair": "\ud800",
        "of 20,000 letters": "x" * 20_000,
        "a path": "../../etc/passwd",
    }.items():
        yield _case(
            f"client is {name}",
            "foreign_identity wrong_task malformed",
            lambda good, v=value: good.saying(client=v),  # type: ignore[misc]
        )
    for name, value in {"a number": 7, "null": None, "absent": ..., "a list": ["x"]}.items():
        yield _case(f"client is {name}", "malformed", lambda good, v=value: good.saying(client=v))  # type: ignore[misc]
    for name, value in {
        "that of another model": "0123456789abcdef" * 4,
        "cut short": "ab",
        "empty": "",
        "half a surrogate pair": "\udfff",
        "a path": "../" * 20,
        "of 20,000 letters": "x" * 20_000,
    }.items():
        yield _case(f"base is {name}", "stale_base malformed", lambda good, v=value: good.saying(base=v))  # type: ignore[misc]
    yield _case("base is in capitals", "stale_base", lambda good: good.saying(base=good.task.base.upper()))
    for name, value in {"a number": 7, "null": None, "absent": ...}.items():
        yield _case(f"base is {name}", "malformed", lambda good, v=value: good.saying(base=v))  # type: ignore[misc]


def _tensor_sets() -> Iterator[BadResult]:
    for name in TENSORS:

        def without(good: Sound, name: str = name) -> bytes:
            return good.having({each: value for each, value in good.tensors.items() if name not in each})

        yield _case(f"{name} is missing", "missing_tensor", without)
    yield _case("no tensor at all", "missing_tensor", lambda good: good.having({}))
    yield _case(
        "one tensor more",
        "extra_tensor",
        lambda good: good.having({**good.tensors, "delta/other": np.ones(3, np.float32)}),
    )
    yield _case(
        "1,000 empty tensors more",
        "extra_tensor oversized",
        lambda good: good.having(
            {**good.tensors, **{f"delta/{at}": np.ones(0, np.float32) for at in range(1000)}}
        ),
    )
    yield _case(
        "a stream nobody asked for",
        "extra_tensor",
        lambda good: good.having({**good.tensors, "control/fc.bias": np.ones(3, np.float32)}),
    )
    yield _case(
        "more than the limit",
        "oversized",
        lambda good: good.having({**good.tensors, "delta/other": np.ones(100_000, np.float32)}),
    )


def _names() -> Iterator[BadResult]:
    for name in (
        "fc.bias",
        "delta/fc.bias/",
        "delta//fc.bias",
        "/delta/fc.bias",
        "delta\\fc.bias",
        "DELTA/fc.bias",
        "delta/fc.bias\0",
        "delta/fc.bias ",
        "delta/fc.b\u0456as",
        "delta/../../../../../../tmp/canary",
        "../delta/fc.bias",
        "/etc/passwd",
        "C:\\windows\\system32",
        "delta/%2e%2e/%2e%2e",
        "delta/\ud800",
        "delta/\r\nX-Client-Cert: x",
        "delta/<script>alert(1)</script>",
        "delta/'; DROP TABLE updates; --",
        "delta/${jndi:ldap://127.0.0.1/a}",
        "__proto__",
        "__class__",
        "",
        "x" * 40_000,
    ):

        def renamed(good: Sound, name: str = name) -> bytes:
            head, data = parsed(good.payload)
            head[name] = head.pop("delta/fc.bias")
            return raw(head, data)

        yield _case(f"a tensor named {name[:40]!a}", "misnamed_tensor malformed", renamed)


class _Canary:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self._path, "unpickled")


def _other_formats() -> Iterator[BadResult]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield _case(
            f"a pickle of protocol {protocol}",
            "malformed",
            lambda good, protocol=protocol: pickle.dumps(_Canary(good.canary), protocol),  # type: ignore[misc]
        )
    yield _case(
        "a pickle behind the length of a header",
        "malformed",
        lambda good: raw(pickle.dumps(_Canary(good.canary))),
    )
    yield _case("an archive as torch.save makes it", "malformed", _torch_archive)
    yield _case("an .npy file of pickled objects", "malformed", _object_array)
    yield _case("an .npz file", "malformed", _npz)
    yield _case("gzip", "malformed", lambda good: gzip.compress(good.payload, mtime=0))
    yield _case("deflated without saying so", "malformed", lambda good: zlib.compress(good.payload))
    yield _case("a tar archive with a path out of it", "malformed", _tar)
    yield _case("an ELF program", "malformed", lambda good: b"\x7fELF" + bytes(200))
    yield _case("the header alone as JSON", "malformed", lambda good: good.payload[8:-60])
    yield _case("the message as JSON", "malformed", lambda good: json.dumps(good.values).encode())
    yield _case("zeros", "malformed", lambda good: bytes(len(good.payload)))
    yield _case("0xFF", "malformed", lambda good: b"\xff" * len(good.payload))
    yield _case("HTTP", "malformed", lambda good: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for seed in range(8):
        yield _case(
            f"random bytes, seed {seed}",
            "malformed",
            lambda good, seed=seed: random.Random(seed).randbytes(400),  # type: ignore[misc]
        )


def _torch_archive(good: Sound) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Canary(good.canary), 2))
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def _object_array(good: Sound) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([_Canary(good.canary)], object), allow_pickle=True)
    return out.getvalue()


def _npz(good: Sound) -> bytes:
    out = io.BytesIO()
    np.savez(out, **{name.replace("/", "_"): value for name, value in good.tensors.items()})  # type: ignore[arg-type]
    return out.getvalue()


def _tar(good: Sound) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("../../../../tmp/canary")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    return out.getvalue()


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A good result with something changed: bytes flipped, cut, repeated or moved, or numbers in its header."""
    change = rng.choice((_flip, _cut_out, _repeat, _swap, _renumber, _overwrite))
    return change(payload, rng)


def _flip(payload: bytes, rng: random.Random) -> bytes:
    """Bits of the header only: in the data another bit is another, possibly sound, number."""
    changed = bytearray(payload)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(payload) - 60)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut_out(payload: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(payload))
    return payload[:start] + payload[start + rng.randint(1, 64) :]


def _repeat(payload: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(payload))
    stop = start + rng.randint(1, 64)
    return payload[:stop] + payload[start:stop] * rng.randint(1, 4) + payload[stop:]


def _swap(payload: bytes, rng: random.Random) -> bytes:
    middle = rng.randrange(1, len(payload))
    return payload[middle:] + payload[:middle]


def _renumber(payload: bytes, rng: random.Random) -> bytes:
    """Another number in place of one of the header's."""
    head, data = parsed(payload)
    name = rng.choice(["delta/fc.bias", "delta/fc.weight"])
    key = rng.choice(["shape", "data_offsets"])
    numbers = head[name][key]
    numbers[rng.randrange(len(numbers))] = rng.choice(
        [-1, 0, 1.5, True, None, "3", 2**31, 2**63, 10**300, 1e300]
    )
    return raw(head, data)


def _overwrite(payload: bytes, rng: random.Random) -> bytes:
    """NaN in place of a number of the data."""
    at = len(payload) - 4 * rng.randint(1, 15)
    nan = struct.pack("<I", rng.choice([0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF]))
    return payload[:at] + nan + payload[at + 4 :]
