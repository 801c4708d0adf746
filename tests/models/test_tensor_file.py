"""The reader of .safetensors files reads what `safetensors` writes, refuses what it refuses, and charges no private memory."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from models import tensor_file
from models.hugging_face.folder import open_file
from models.options import JobError
from tests.support import ranks

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.int64), "c": torch.tensor(7.0)}
HERE = "tests.models.test_tensor_file"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file."""
    file = tmp_path / "x.safetensors"
    safetensors.torch.save_file(TENSORS, file, {"format": "pt"})
    return file


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the header; `edit` changes it, or returns the bytes that take its place."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    edited = edit(header)
    encoded = edited if isinstance(edited, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[end:])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2,
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype_is_read_as_safetensors_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    bits = torch.arange(24 * dtype.itemsize, dtype=torch.uint8) % 2
    values = bits.view(dtype).view(4, 6)
    tensors = {
        "pad": torch.ones(3, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
        "x": values,
        "one": values[1, 1].clone(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "x", {"key": "value"})
    found, metadata = tensor_file.read_header(tmp_path / "x")
    assert metadata == {"key": "value"} and found.keys() == tensors.keys()
    for name, expected in safetensors.torch.load_file(tmp_path / "x").items():
        read = found[name].read()
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        assert torch.equal(read.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
    part = found["x"].read((slice(1, 3), slice(2, 5)))
    assert torch.equal(part.contiguous().view(torch.uint8), values[1:3, 2:5].contiguous().view(torch.uint8))


def swap(header: dict[str, Any], name: str, **keys: Any) -> None:
    header[name] |= keys


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown dtype": (lambda h: swap(h, "a", dtype="F7"), r"tensor 'a' has the dtype 'F7', expected one of I64, .*F8_E5M2"),
    "no shape": (lambda h: h["a"].pop("shape") and None, r"tensor 'a' is .*expected dtype, shape and two data_offsets"),
    "negative shape": (lambda h: swap(h, "a", shape=[-2, -3]), r"tensor 'a' is .*whole numbers of 0 or more"),
    "size": (lambda h: swap(h, "a", shape=[2, 4]), r"tensor 'a', F32 \[2, 4\], has data_offsets .* expected 32 bytes"),
    "overlap": (
        lambda h: swap(h, "c", data_offsets=h["a"]["data_offsets"], shape=[6]),
        r"tensor 'c' overlaps the one before it: it begins at byte [\d,]+, expected [\d,]+",
    ),
    "gap": (lambda h: h.pop("a") and None, r"tensor 'c' does not follow the one before it"),
    "beyond the end": (
        lambda h: swap(h, "c", data_offsets=[each + 4 for each in h["c"]["data_offsets"]]),
        r"tensor 'c' does not follow the one before it",
    ),
    "huge": (
        lambda h: swap(h, "a", shape=[2**40, 2**40]),
        r"tensor 'a' has the shape \[1099511627776, 1099511627776\], expected less than 2\^63 numbers",
    ),
    "metadata": (lambda h: h.update(__metadata__={"a": 1}), r"__metadata__ is .*expected texts by name"),
    "a list": (lambda h: b"[]", r"its header holds list, expected an object"),
    "no JSON": (lambda h: b"{", r"its header is not JSON"),
    "no text": (lambda h: b"\xff\xfe{}", r"its header is not JSON"),
    "deep": (lambda h: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"its header is not JSON"),
    "twice": (lambda h: json.dumps(h)[:-1].encode() + b', "a": {}}', r"its header has 'a' more than once"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_header_is_refused_with_the_reason(damage: str, path: Path) -> None:
    edit, reason = DAMAGES[damage]
    change(path, edit)
    with pytest.raises(ValueError, match=rf"x.safetensors is not a readable .safetensors file: {reason}"):
        tensor_file.read_header(path)
    with pytest.raises(JobError, match=rf"^{re.escape(str(path))} is not a readable"):
        open_file(path)
    with pytest.raises(SafetensorError):  # so nothing is refused that others read
        safetensors.torch.load_file(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its header would have 0 bytes of 0"),
        (b"\x05\0\0", "its header would have 5 bytes of 3"),
        (b"\xff" * 8, "its header would have 18,446,744,073,709,551,615 bytes of 8"),
        (b"\x09" + b"\0" * 7 + b"{}", "its header would have 9 bytes of 10"),
    ],
)
def test_a_file_shorter_than_its_header_is_refused(content: bytes, reason: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        tensor_file.read_header(path)


def test_a_header_that_is_too_long_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # a hole
    with pytest.raises(
        ValueError, match="would have 100,000,001 bytes of 200,000,000; expected at most 100,000,000"
    ):
        tensor_file.read_header(path)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_that_was_cut_off_or_added_to_is_refused(more: int, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:more] if more < 0 else content + b"\0")
    with pytest.raises(
        ValueError, match=rf"it has {len(content) + more} bytes, expected {len(content)} by its header"
    ):
        tensor_file.read_header(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="it is a folder, expected a regular file"):
        open_file(tmp_path)
    with pytest.raises(JobError, match="does not exist"):
        open_file(tmp_path / "none")


def read_in_little_memory(path: str) -> None:
    import resource

    from tests.models.pretrain.limited import private_bytes

    source = open_file(Path(path))
    source.read("x", (slice(0, 1),))  # with all that the first read loads
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() + 16 * 1024**2, before[1]))
    with pytest.raises(OSError):  # the limit holds
        mmap.mmap(-1, 64 * 1024**2, flags=mmap.MAP_PRIVATE)
    for row in range(0, 4096, 512):
        assert float(source.read("x", (slice(row, row + 1), slice(0, 4)))[0, 0]) == row


@pytest.mark.slow
def test_reading_parts_of_a_large_file_charges_no_private_memory(tmp_path: Path) -> None:
    """A rank of a sharded training reads its share of a model that it may not hold (`RLIMIT_DATA`)."""
    values = np.repeat(np.arange(4096, dtype=np.float32)[:, None], 4096, 1)  # 64 MiB
    safetensors.torch.save_file({"x": torch.from_numpy(values)}, tmp_path / "x.safetensors")
    ranks.run(1, f"{HERE}:read_in_little_memory", str(tmp_path / "x.safetensors"))
