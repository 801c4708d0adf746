"""A fixed corpus of what hostile devices send: malformed requests here, malformed results in `hostile_results`.

Every case is enrolled first, so nothing but its content is wrong. It is a few requests; those before the last are
in order, and the last, or the announcement of an upload, is refused with one of `codes`. Cases are named, and the same each time.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from coordinator.limits.request_bodies import ANONYMOUS_LIMIT_BYTES
from edge_client.wire import device as wire
from tests.support.device_client import Answer, RawDevice, checkin, csr, message, new_key, renewal, request
from tests.support.hostile_results import BadResult, Sound, bad_results


@dataclass(frozen=True)
class Target:
    """What a hostile device knows: a train task of its own, and things that are not its own.

    Attributes:
        device: its id. task: leased to it. sound: a good result of this task.
        limit_bytes: of a result.
        other_task, other_device: of another device. foreign_blob: hash of a blob that no task of it names.
        certificate: its own, PEM. key: its key. other_certificate: of another device, PEM.
        token: one that was used up.
    """

    device: str
    task: str
    sound: Sound
    limit_bytes: int
    dataset: str
    other_task: str
    other_device: str
    foreign_blob: str
    certificate: str
    key: ec.EllipticCurvePrivateKey
    other_certificate: str
    token: str


@dataclass(frozen=True)
class Case:
    """One thing that a hostile device does.

    Attributes:
        requests: what is sent, one after the other.
        ends_task: after it nothing more of the task is wanted.
        ends_line: what is sent is no whole request, so that nothing can follow it on its connection.
    """

    name: str
    codes: frozenset[str]
    requests: Callable[[Target], Sequence[bytes]]
    ends_task: bool = False
    ends_line: bool = False

    def play(self, device: RawDevice, target: Target) -> Answer:
        """What the first refusal, or the last request, was answered with.

        Raises:
            NoAnswer: the connection ended without one.
        """
        answer = None
        for content in self.requests(target):
            answer = device.send(content)
            if answer.status != 200:
                break
        if self.ends_line:
            device.close()
        assert answer is not None, "a case sends something"
        return answer


def result_cases() -> list[Case]:
    """Whole uploads of bad results. Each ends its task."""
    return [Case(f"result: {bad.name}", bad.codes, partial(_uploaded, bad), True) for bad in bad_results()]


def request_cases() -> list[Case]:
    """Everything else; the task stays as it was."""
    groups = (
        _checkins,
        _announcements,
        _pieces,
        _encodings,
        _task_ids,
        _evaluations,
        _declines,
        _enrolments,
        _renewals,
        _blobs,
        _http,
    )
    return [case for group in groups for case in group()]


def _uploaded(bad: BadResult, target: Target) -> list[bytes]:
    return sent(target, bad.make(target.sound))


def sent(target: Target, payload: bytes, encoded: bytes | None = None, **changed: Any) -> list[bytes]:
    """An announcement and one piece; `encoded`: what is sent in place of the payload."""
    wired = payload if encoded is None else encoded
    start = wire.UploadStart(len(wired), hashlib.sha256(wired).hexdigest(), len(payload))
    encoding = "identity" if encoded is None else "deflate"
    upload_start = wire.to_json(start) | {"encoding": encoding} | changed
    return [_announced(target, upload_start), _piece(target, wired)]


def _announced(target: Target, upload_start: Any, task: str | None = None) -> bytes:
    return request("POST", f"/tasks/{target.task if task is None else task}/upload", message(upload_start))


def _piece(target: Target, piece: bytes, offset: Any = 0, **more: Any) -> bytes:
    return request("PUT", f"/tasks/{target.task}/upload?offset={offset}", piece, **more)


def _one(name: str, codes: str | Sequence[str], make: Callable[[Target], bytes]) -> Case:
    return _all(name, codes, lambda target: [make(target)])


def _all(
    name: str,
    codes: str | Sequence[str],
    make: Callable[[Target], Sequence[bytes]],
    *,
    ends_line: bool = False,
) -> Case:
    return Case(
        name, frozenset(codes.split() if isinstance(codes, str) else codes), make, ends_line=ends_line
    )


_NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "an unfinished object": b'{"wire": "1.2"',
    "two documents": b"{}{}",
    "a list": b"[]",
    "a string": b'"x"',
    "a number": b"1",
    "null": b"null",
    "NaN": b"NaN",
    "not UTF-8": b'{"wire": "\xff\xfe"}',
    "UTF-16": '{"wire": "1.2"}'.encode("utf-16"),
    "NUL bytes": bytes(100),
    "100,000 lists deep": b"[" * 100_000,
    "12,000 objects deep": b'{"wire":' * 12_000,
    "a pickle": pickle.dumps({"wire": "1.2"}),
    "a form": b"wire=1.2&software=x",
    "XML": b'<?xml version="1.0"?><a/>',
    "a number of 5,000 digits": b'{"memory_bytes": ' + b"9" * 5_000 + b"}",
    "a key twice": b'{"wire": "1.2", "wire": "1.1"}',
}


def _bodies(path: Callable[[Target], str], kind: str) -> Iterator[Case]:
    """What is no message of any kind, sent where one of `kind` belongs."""
    for name, body in _NO_JSON.items():
        yield _one(
            f"{kind} is {name}",
            "malformed oversized" if len(body) > ANONYMOUS_LIMIT_BYTES else "malformed",
            lambda target, body=body: request("POST", path(target), body),  # type: ignore[misc]
        )
    yield _one(
        f"{kind} of 2 MB", "oversized", lambda target: request("POST", path(target), b'"' + b"x" * 2**21)
    )


def _fields(
    path: Callable[[Target], str],
    kind: str,
    good: Callable[[Target], dict[str, Any]],
    wrong: dict[str, Sequence[Any]],
    codes: str = "malformed",
) -> Iterator[Case]:
    """A good message with one wrong value, or without a key (`...`)."""
    for key, values in wrong.items():
        for value in values:
            shown = "absent" if value is ... else ascii(value)[:30]

            def make(target: Target, key: str = key, value: Any = value) -> bytes:
                upload_start = {**good(target), key: value}
                if value is ...:
                    del upload_start[key]
                return request("POST", path(target), message(upload_start))

            yield _one(f"{kind}: {key} is {shown}", codes, make)


def _checkins() -> Iterator[Case]:
    def path(target: Target) -> str:
        return "/checkin"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(checkin(target.dataset))

    yield from _bodies(path, "check-in")
    wrong: dict[str, Sequence[Any]] = {
        "wire": [
            ...,
            None,
            1.2,
            [1, 2],
            "",
            "1",
            "one",
            "1.2.3",
            "-1.2",
            "1.2\0",
            "\ud800",
            "1." + "9" * 5000,
        ],
        "software": [..., 7, None, "\ud800"],
        "runtimes": [..., None, [], "torch", {"torch": 2}, {"torch": None}, {"\ud800": "2"}],
        "memory_bytes": [..., "1", 1.5, True, None, math.nan],
        "device_class": [7, None, []],
        "labels": [7, [], {"a": 1}, {"a": {"b": "c"}}],
        "datasets": [[], {"digits": "10"}, {"digits": 1.5}, {"digits": True}],
        "models": ["logreg", [1], {}, None],
        "ineligible": ["battery", [1]],
        "opted_out": [{}, [None]],
        "working_on": [7, [], {}],
        "wait_seconds": ["1", None, True, math.nan, math.inf, 10**400],
    }
    yield from _fields(path, "check-in", good, wrong)
    yield from _fields(path, "check-in", good, {"wire": ["0.9", "2.0", "99999.0"]}, "wire_version")


def _announcements() -> Iterator[Case]:
    def path(target: Target) -> str:
        return f"/tasks/{target.task}/upload"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(wire.UploadStart(100, "ab" * 32, 100))

    yield from _bodies(path, "announcement")
    wrong: dict[str, Sequence[Any]] = {
        "size_bytes": [..., None, "100", 1.5, True, 0, -1, 99, -(2**63), 2**63, 10**400],
        "decoded_bytes": [..., None, "100", 100.0, 0, -1, 99, 2**63, 10**400],
        "sha256": [
            ...,
            None,
            7,
            "",
            "ab",
            "AB" * 32,
            "zz" * 32,
            "../" * 21 + "a",
            "ab" * 31 + "a\0",
            "x" * 10_000,
        ],
        "encoding": [None, 7, "", "gzip", "br", "Deflate", ["deflate"], True],
    }
    yield from _fields(path, "announcement", good, wrong)
    for key in ("size_bytes", "decoded_bytes"):
        sizes = {key: [10**9, 2**62]}
        yield from _fields(path, "announcement", good, sizes, "oversized")


def _pieces() -> Iterator[Case]:
    def announced(target: Target, then: Callable[[Target, bytes], bytes]) -> list[bytes]:
        start, _ = sent(target, target.sound.payload)
        return [start, then(target, target.sound.payload)]

    for offset in (1, 419, 10**6, 2**31, 2**63, 10**30):
        yield _all(
            f"piece at offset {offset}",
            "upload_offset malformed" if offset > 2**53 else "upload_offset",
            partial(announced, then=lambda target, payload, at=offset: _piece(target, payload, at)),  # type: ignore[misc]
        )
    for offset in ("-1", "-9223372036854775808", "x", "1.5", "", "0x10", "NaN", "null", "0%00", "9" * 5000):  # type: ignore[assignment]
        yield _all(
            f"piece at offset {str(offset)[:20]!r}",
            "malformed",
            partial(announced, then=lambda target, payload, at=offset: _piece(target, payload, at)),  # type: ignore[misc]
        )
    yield _all(
        "piece without an offset",
        "malformed",
        partial(
            announced,
            then=lambda target, payload: request("PUT", f"/tasks/{target.task}/upload", payload),
        ),
    )
    for name, more in {"one byte": 1, "1 MB": 2**20}.items():
        yield _all(
            f"{name} more than announced",
            "oversized",
            partial(announced, then=lambda target, payload, n=more: _piece(target, payload + bytes(n))),  # type: ignore[misc]
        )
    yield _all(
        "1 MB more than announced, in chunks",
        "oversized",
        partial(announced, then=_too_many_chunks),
        ends_line=True,
    )
    yield _all(
        "an announcement of half of it, then all",
        "oversized",
        lambda target: sent(target, target.sound.payload, size_bytes=210, decoded_bytes=210),
    )
    yield _all(
        "bytes that are not those announced",
        "hash_mismatch",
        partial(announced, then=lambda target, payload: _piece(target, payload[::-1])),
    )
    yield _all(
        "a hash that is not that of the bytes",
        "hash_mismatch",
        lambda target: sent(target, target.sound.payload, sha256="ab" * 32),
    )
    yield _all(
        "gzip as the HTTP encoding",
        "hash_mismatch oversized",
        partial(
            announced,
            then=lambda target, payload: _piece(
                target, payload[::-1], headers=[("Content-Encoding", "gzip")]
            ),
        ),
    )


def _too_many_chunks(target: Target, payload: bytes) -> bytes:
    """No length, and no end either: the line is cut off by whoever had enough."""
    head = request("PUT", f"/tasks/{target.task}/upload?offset=0", None, [("Transfer-Encoding", "chunked")])
    return head + (b"1000\r\n" + bytes(4096) + b"\r\n") * 256


def _encodings() -> Iterator[Case]:
    """What does not inflate to what was announced; nothing of it is kept, and the device may try again."""
    deflated = {
        "a stream cut short": lambda payload: zlib.compress(payload)[:-5],
        "a stream with garbage behind it": lambda payload: zlib.compress(payload) + b"garbage",
        "two streams": lambda payload: zlib.compress(payload) * 2,
        "a wrong checksum": lambda payload: _with_last_bit_flipped(zlib.compress(payload)),
        "no zlib header": lambda payload: _raw_deflate(payload),
        "the result as it is": lambda payload: payload,
        "a deflated deflated result": lambda payload: zlib.compress(zlib.compress(payload)),
        "a preset dictionary": lambda payload: _with_dictionary(payload),
        "a bomb of zeros": lambda payload: zlib.compress(bytes(50_000_000), 9),
        "a bomb in a bomb": lambda payload: zlib.compress(zlib.compress(bytes(50_000_000), 9), 9),
        "one byte of zero": lambda payload: b"\0",
        "an empty stream": lambda payload: zlib.compress(b""),
        "one byte more than announced": lambda payload: zlib.compress(payload + b"\0"),
        "one byte less than announced": lambda payload: zlib.compress(payload[:-1]),
    }
    for name, encode in deflated.items():
        yield _all(
            f"deflate: {name}",
            "bad_encoding",
            lambda target, encode=encode: sent(  # type: ignore[misc]
                target, target.sound.payload, encode(target.sound.payload)
            ),
        )
    bomb = zlib.compress(bytes(50_000_000), 9)
    yield _all(
        "deflate: a bomb that announces the limit",
        "bad_encoding",
        lambda target: sent(target, bytes(target.limit_bytes), bomb),
    )
    for size in (2**31, 2**62, 50_000_000):
        yield _one(
            f"deflate: a bomb that announces {size} bytes",
            "oversized",
            lambda target, size=size: sent(target, b"x", bomb, decoded_bytes=size)[0],  # type: ignore[misc]
        )


def _with_last_bit_flipped(stream: bytes) -> bytes:
    return stream[:-1] + bytes([stream[-1] ^ 1])


def _raw_deflate(payload: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(payload) + stream.flush()


def _with_dictionary(payload: bytes) -> bytes:
    stream = zlib.compressobj(zdict=b"delta/fc.weight")
    return stream.compress(payload) + stream.flush()


def _task_ids() -> Iterator[Case]:
    unknown = str(uuid.UUID(int=7))
    verbs = {
        "upload": message(wire.UploadStart(100, "ab" * 32, 100)),
        "decline": message(wire.Decline("failed", "x")),
        "evaluation": message(wire.EvaluationResult("ab" * 32, 1, 1, 1, 0.5)),
    }
    for verb, body in verbs.items():

        def make(target: Target, task: str, verb: str = verb, body: bytes = body) -> bytes:
            return request("POST", f"/tasks/{task}/{verb}", body)

        yield _one(f"{verb} of an unknown task", "not_found", partial(make, task=unknown))
        yield _one(
            f"{verb} of another device's task",
            "not_yours",
            lambda target, make=make: make(target, target.other_task),  # type: ignore[misc]
        )
        yield _one(
            f"{verb} of a task in capitals",
            "not_found",
            lambda target, make=make: make(target, target.task.upper() + "X"),  # type: ignore[misc]
        )
        for task in (
            "..",
            "../../../../etc/passwd",
            "%2e%2e",
            "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
            "%252e%252e",
            "..%5c..%5cwindows",
            "%00" * 12,
            "%ff%fe" * 6,
            quote("/etc/passwd", safe=""),
            "C:%5c",
            "x" * 36,
            "%00" + "x" * 35,
            "%ED%A0%80" * 12,
            "'%20OR%201=1--",
            "x" * 5_000,
        ):
            yield _one(f"{verb} of the task {_short(task)}", "not_found", partial(make, task=task))
    yield _one(
        "a piece of another device's upload",
        "not_yours",
        lambda target: request("PUT", f"/tasks/{target.other_task}/upload?offset=0", b"x"),
    )
    yield _one(
        "figures for a train task",
        "wrong_kind",
        lambda target: request("POST", f"/tasks/{target.task}/evaluation", verbs["evaluation"]),
    )


def _evaluations() -> Iterator[Case]:
    def path(target: Target) -> str:
        return f"/tasks/{target.task}/evaluation"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(wire.EvaluationResult(target.sound.task.base, 10, 10, 5, 3.0, "site"))

    yield from _bodies(path, "evaluation")
    wrong: dict[str, Sequence[Any]] = {
        "base": [..., 7, None, "\ud800"],
        "rows": [..., 0, -1, 1.5, True, "10", None, 2**53 + 1, 10**400],
        "labels": [..., 0, -1, 1.5, "10", 2**53 + 1],
        "correct": [..., -1, 11, 1.5, "5", 2**53 + 1],
        "loss_sum": [..., -1.0, math.nan, math.inf, -math.inf, "3", None, True, 10**400],
        "site": [7, None, "\ud800", "a\0b"],
    }
    yield from _fields(path, "evaluation", good, wrong)


def _declines() -> Iterator[Case]:
    def path(target: Target) -> str:
        return f"/tasks/{target.task}/decline"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(wire.Decline("failed", "it failed"))

    yield from _bodies(path, "decline")
    wrong: dict[str, Sequence[Any]] = {
        "code": [..., None, 7, "", "because", "FAILED", "failed\0", ["failed"], {}],
        "words": [..., None, 7, [], "\ud800", "a\0b"],
    }
    yield from _fields(path, "decline", good, wrong)


def _enrolments() -> Iterator[Case]:
    def path(target: Target) -> str:
        return "/enrol"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(wire.EnrolRequest(target.token, csr(new_key()), "raw"))

    yield from _bodies(path, "enrolment")
    wrong: dict[str, Sequence[Any]] = {
        "token": [..., None, 7, "\ud800"],
        "csr": [..., None, 7],
        "name": [..., None, 7, "\ud800", "a\0b"],
        "serial_number": [7, [], "a\0b"],
    }
    yield from _fields(path, "enrolment", good, wrong)
    tokens = ["", "x", "fl1..", "fl1." + "ab" * 32 + ".x", "fl2.a.b", "../../x", "' OR 1=1 --", "x" * 10_000]
    yield from _fields(path, "enrolment", good, {"token": tokens}, "token_unknown malformed")
    yield _one("enrolment: a token that was used up", "token_used", lambda target: _enrolling(target))
    bad: dict[str, Callable[[], str]] = {
        "nothing": lambda: "",
        "text": lambda: "-----BEGIN CERTIFICATE REQUEST-----\nx\n-----END CERTIFICATE REQUEST-----\n",
        "cut short": lambda: csr(new_key())[:200],
        "of an RSA key": _rsa_csr,
        "of a P-384 key": lambda: csr(ec.generate_private_key(ec.SECP384R1())),
        "signed by another key": _forged_csr,
        "not ASCII": lambda: "\u00e9" * 100,
        "100 kB of A": lambda: "-----BEGIN CERTIFICATE REQUEST-----\n" + "A" * 100_000,
    }
    for name, make in bad.items():
        yield _one(
            f"enrolment: the request is {name}",
            "bad_csr token_used malformed oversized",
            lambda target, make=make: _enrolling(target, make()),  # type: ignore[misc]
        )


def _enrolling(target: Target, wanted: str | None = None) -> bytes:
    requested = wire.EnrolRequest(target.token, csr(new_key()) if wanted is None else wanted, "raw")
    return request("POST", "/enrol", message(requested))


def _rsa_csr() -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rsa")])
    key = rsa.generate_private_key(65537, 2048)
    made = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return made.public_bytes(serialization.Encoding.PEM).decode()


def _forged_csr() -> str:
    """A request whose signature is that of another one."""
    der = bytearray(x509.load_pem_x509_csr(csr(new_key()).encode()).public_bytes(serialization.Encoding.DER))
    other = x509.load_pem_x509_csr(csr(new_key()).encode()).public_bytes(serialization.Encoding.DER)
    der[-60:] = other[-60:] if len(other) == len(der) else bytes(60)
    import base64

    text = base64.encodebytes(bytes(der)).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{text}-----END CERTIFICATE REQUEST-----\n"


def _renewals() -> Iterator[Case]:
    def path(target: Target) -> str:
        return "/renew"

    def good(target: Target) -> dict[str, Any]:
        return wire.to_json(renewal(target.certificate, target.key, new_key()))

    yield from _bodies(path, "renewal")
    wrong: dict[str, Sequence[Any]] = {
        "certificate": [..., None, 7],
        "csr": [..., None, 7],
        "proof": [..., None, 7],
    }
    yield from _fields(path, "renewal", good, wrong)
    proofs = ["", "x", "AAAA", "\u00e9", "=" * 100, "A" * 10_000]
    yield from _fields(path, "renewal", good, {"proof": proofs}, "bad_proof malformed")
    certificates = [
        "",
        "x",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        "A" * 100_000,
        "\u00e9",
    ]
    yield from _fields(
        path,
        "renewal",
        good,
        {"certificate": certificates},
        "foreign_certificate malformed bad_proof oversized",
    )
    yield from _fields(path, "renewal", good, {"csr": ["", "x", "A" * 10_000]}, "bad_csr bad_proof malformed")
    yield _one(
        "renewal of another device's certificate",
        "bad_proof",
        lambda target: request(
            "POST", "/renew", message(renewal(target.other_certificate, target.key, new_key()))
        ),
    )


def _blobs() -> Iterator[Case]:
    for name in (
        "..",
        "../../pki/ca.key",
        "%2e%2e%2f%2e%2e%2fpki%2fca.key",
        "%2e%2e%2f%2e%2e%2fadmin.token",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "%00",
        "ab" * 31 + "%00%00",
        "AB" * 32,
        "ab" * 32,
        "ab",
        "ab" * 5_000,
        "%ff" * 64,
        "fedloop.db",
        "*",
        "~root",
    ):
        yield _one(
            f"blob {_short(name)}",
            "not_found" if len(name) < 8_000 else "url_too_long",
            lambda target, name=name: request("GET", f"/blobs/{name}"),  # type: ignore[misc]
        )
    yield _one(
        "a blob of somebody else", "not_yours", lambda target: request("GET", f"/blobs/{target.foreign_blob}")
    )
    for unit in (
        "bytes=x-y",
        "bytes=9-1",
        "bytes=999999999-",
        "lines=0-1",
        "bytes=",
        "bytes=-",
        "bytes=0-0," * 500,
    ):
        yield _one(
            f"range {unit[:24]!r}",
            "bad_range",
            lambda target, unit=unit: request(  # type: ignore[misc]
                "GET", f"/blobs/{target.sound.task.base}", None, [("Range", unit)]
            ),
        )


def _http() -> Iterator[Case]:
    good = message({"wire": "1.2"})
    for method in ("GET", "DELETE", "PATCH", "OPTIONS", "TRACE", "PUT"):
        yield _one(
            f"{method} of the check-in",
            "method_not_allowed",
            lambda target, method=method: request(method, "/checkin", b""),  # type: ignore[misc]
        )
    for path in (
        "/nowhere",
        "/",
        "",
        "/checkin/",
        "//checkin",
        "/../v1/checkin",
        "/CHECKIN",
        "/%2e%2e/api/v1/runs",
    ):
        yield _one(
            f"the path {path!r}",
            "not_found",
            lambda target, path=path: request("POST", path, b"{}"),  # type: ignore[misc]
        )
    for kind in (
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/x-pickle",
        "x" * 5_000,
        "\xff\xfe",
    ):
        yield _one(
            f"a check-in of type {kind[:20]!r} that is none",
            "malformed",
            lambda target, kind=kind: request("POST", "/checkin", good, [("Content-Type", kind)]),  # type: ignore[misc]
        )
    yield _one(
        "a check-in that claims to be gzip",
        "malformed",
        lambda target: request("POST", "/checkin", zlib.compress(good), [("Content-Encoding", "gzip")]),
    )
    for name, content in {
        "a negative length": request("POST", "/checkin", good, length="-1"),
        "a length that is none": request("POST", "/checkin", good, length="x"),
        "a length of 30 digits": request("POST", "/checkin", good, length="9" * 30),
        "two lengths": request("POST", "/checkin", good, [("Content-Length", "1")]),
        "length and chunks": request("POST", "/checkin", good, [("Transfer-Encoding", "chunked")]),
        "a chunk of no size": _chunked(b"x\r\n\r\n"),
        "a chunk of a huge size": _chunked(b"FFFFFFFFFFFFFFFFF\r\n\r\n"),
        "a header without a colon": b"POST /device/v1/checkin HTTP/1.1\r\nHost\r\n\r\n",
        "a header with a NUL": b"POST /device/v1/checkin HTTP/1.1\r\nA: \0\r\n\r\n",
        "a header name with a space": b"POST /device/v1/checkin HTTP/1.1\r\nA b: c\r\n\r\n",
        "a folded header": b"POST /device/v1/checkin HTTP/1.1\r\n A: b\r\n\r\n",
        "no HTTP": b"hello\r\n\r\n",
        "another version": b"GET /device/v1/ca HTTP/9.9\r\n\r\n",
        "SSH": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        "a NUL in the path": b"GET /device/v1/\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        "a space in the path": b"GET /device/v1/a b HTTP/1.1\r\nHost: x\r\n\r\n",
    }.items():
        yield _all(
            f"HTTP: {name}",
            "malformed",
            lambda target, content=content: [content],  # type: ignore[misc]
            ends_line=True,
        )
    yield _all(
        "a path with a header in it",
        "malformed not_found",
        lambda target: [request("GET", "/blobs/x HTTP/1.1\r\nX-Client-Cert: x\r\nA: b")],
        ends_line=True,
    )


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:20]!r} of {len(text)} letters"


def _chunked(chunks: bytes) -> bytes:
    return request("POST", "/checkin", None, [("Transfer-Encoding", "chunked")]) + chunks


def canary(folder: Path) -> Path:
    """The file that only unpickled code writes."""
    return folder / "canary"
