"""Secure aggregation beside Flower's SecAgg+: time of all clients and the server, and bytes of the masked input.

64 clients, a million values, 10 % of the clients drop out after they have shared their keys. Both use the same graph (20 neighbours), the same
threshold (two thirds) and 22 bits a value; ours has signatures and full-strength keys. Flower's side is its own functions (flwr 1.41, the legacy
API) without its messages and its strategy. The two take turns, ours before and after Flower's. `FEDLOOP_BENCH_SHORT=1` takes a
hundredth of the values: quick to look at, and no proof.

The target: a quarter of Flower's time and half of its masked bytes at most.
"""

from __future__ import annotations

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import hashlib
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from strategies.secagg.client import Client
from strategies.secagg.graph import log_degree
from strategies.secagg.ring import FixedPoint
from strategies.secagg.server import Server
from strategies.secagg.terms import Terms

SHORT = os.environ.get("FEDLOOP_BENCH_SHORT") == "1"
CLIENTS, VALUES, DROPPED = 64, 10_000 if SHORT else 1_000_000, 6
BOUND, VALUE_BITS, MOST_WEIGHT = 1.0, 22, 1000


def run() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    vectors = rng.uniform(-1, 1, (CLIENTS, VALUES)).astype(np.float32)
    weights = rng.integers(1, MOST_WEIGHT, CLIENTS).tolist()
    turns = [_measure(way, vectors, weights) for way in (_ours, _flower, _ours)]
    flower, ours = turns[1], [turns[0], turns[2]]
    alive = slice(DROPPED, None)
    exact = np.average(vectors[alive].astype(np.float64), axis=0, weights=weights[alive])
    found: dict[str, Any] = {
        "ours": {key: (ours[0][key] + ours[1][key]) / 2 for key in ("seconds", "cpu_seconds")},
        "flower": {key: flower[key] for key in ("seconds", "cpu_seconds")},
        "masked_bytes": {"ours": ours[0]["bytes"], "flower": flower["bytes"]},
        "largest_error": {"ours": float(np.abs(ours[0]["mean"] - exact).max())},
        "degree": log_degree(CLIENTS),
    }
    found["times_faster"] = {
        key: found["flower"][key] / found["ours"][key] for key in ("seconds", "cpu_seconds")
    }
    found["share_of_bytes"] = ours[0]["bytes"] / flower["bytes"]
    print(
        f"secure aggregation of {CLIENTS} clients, {VALUES:,} values: {found['ours']['seconds']:.1f} s, Flower's SecAgg+ "
        f"{found['flower']['seconds']:.1f} s, {found['times_faster']['seconds']:.1f} times as long; masked input "
        f"{ours[0]['bytes']:,} of {flower['bytes']:,} bytes, {found['share_of_bytes']:.2f}; largest error {found['largest_error']['ours']:.1e}"
    )
    found["failures"] = [] if SHORT else [*_failures(found)]
    return found


def _failures(found: dict[str, Any]) -> list[str]:
    wrong = []
    if (times := found["times_faster"]["seconds"]) < 4:
        wrong.append(f"Flower's SecAgg+ takes {times:.1f} times as long, expected 4 or more")
    if found["share_of_bytes"] > 0.5:
        wrong.append(f"the masked input is {found['share_of_bytes']:.2f} of Flower's, expected 0.5 at most")
    if found["largest_error"]["ours"] > BOUND * MOST_WEIGHT / 2 ** (VALUE_BITS - 1):
        wrong.append(f"the mean is off by {found['largest_error']['ours']}")
    return wrong


def _measure(way: Callable[[Any, Any], dict[str, Any]], vectors: Any, weights: Any) -> dict[str, Any]:
    began, cpu_began = time.perf_counter(), time.process_time()
    found = way(vectors, weights)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        **found,
    }


@cache
def _device_key(member: str) -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@cache
def _public_key(member: str) -> ec.EllipticCurvePublicKey:
    return _device_key(member).public_key()


def _verify(member: str, content: bytes, signature: bytes) -> bool:
    try:
        _public_key(member).verify(signature, content, ec.ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def _ours(vectors: Any, weights: Any) -> dict[str, Any]:
    point = FixedPoint(CLIENTS, BOUND, VALUE_BITS, MOST_WEIGHT)
    model = hashlib.sha256(b"model").hexdigest()
    length, bits = point.length(VALUES), point.ring.bits
    terms = Terms("bench", 1, model, 0, CLIENTS, length, bits, log_degree(CLIENTS))
    members = [f"device-{number:02}" for number in range(CLIENTS)]
    server = Server(terms, members, _verify)

    def sign(member: str) -> Callable[[bytes], bytes]:
        return lambda content: _device_key(member).sign(content, ec.ECDSA(SHA256()))

    clients = {member: Client(terms, member, sign(member), _verify, os.urandom) for member in members}
    for member, client in clients.items():
        server.receive(member, client.advertise_keys())
    messages = server.close_stage()
    for member, message in messages.items():
        server.receive(member, clients[member].share_keys(message))
    messages = server.close_stage()
    masked_bytes = 0
    for number, member in enumerate(members):
        if number >= DROPPED:
            residues = point.encode(vectors[number], weights[number])
            masked = clients[member].mask_input(messages[member], residues)
            masked_bytes += len(masked)
            server.receive(member, masked)
    for member, message in server.close_stage().items():
        server.receive(member, clients[member].confirm_survivors(message))
    for member, message in server.close_stage().items():
        server.receive(member, clients[member].reveal_shares(message))
    server.close_stage()
    sums, weight = point.decode_sums(server.sum())
    return {"bytes": masked_bytes, "mean": sums / weight}


def _flower(vectors: Any, weights: Any) -> dict[str, Any]:
    """The stages of `flwr.server.workflow.SecAggPlusWorkflow` with the functions that it and `secaggplus_mod` call."""
    from flwr.common import ConfigRecord, bytes_to_ndarray, ndarrays_to_parameters
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation.quantization import dequantize
    from flwr.common.secure_aggregation.secaggplus_constants import Key

    mod = import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")  # a function has its name too
    half, modulus, levels = log_degree(CLIENTS) // 2, 2**32, 2**VALUE_BITS
    threshold = -(-2 * (2 * half + 1) // 3)
    nodes = range(1, CLIENTS + 1)
    hoods = {node: {(node - 1 + offset) % CLIENTS + 1 for offset in range(-half, half + 1)} for node in nodes}
    settings = {
        Key.SAMPLE_NUMBER: CLIENTS,
        Key.SHARE_NUMBER: 2 * half + 1,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: BOUND,
        Key.TARGET_RANGE: levels,
        Key.MOD_RANGE: modulus,
        Key.MAX_WEIGHT: float(MOST_WEIGHT),
    }
    states = {node: mod.SecAggPlusState() for node in nodes}
    public: dict[int, list[Any]] = {}
    for node, state in states.items():
        state.nid = node
        answer = mod._setup(state, ConfigRecord(settings))
        public[node] = [answer[Key.PUBLIC_KEY_1], answer[Key.PUBLIC_KEY_2]]
    sealed: dict[int, list[tuple[int, bytes]]] = {node: [] for node in nodes}
    for node, state in states.items():
        answer = mod._share_keys(state, ConfigRecord({str(other): public[other] for other in hoods[node]}))
        for receiver, ciphertext in zip(
            answer[Key.DESTINATION_LIST], answer[Key.CIPHERTEXT_LIST], strict=True
        ):
            sealed[receiver].append((node, ciphertext))
    alive = set(nodes[DROPPED:])
    masked_bytes, total = 0, None
    for node in sorted(alive):
        sources, ciphertexts = map(list, zip(*sealed[node], strict=True))
        told = ConfigRecord({Key.CIPHERTEXT_LIST: ciphertexts, Key.SOURCE_LIST: sources})
        params = ndarrays_to_parameters([vectors[node - 1]])
        content = mod._collect_masked_vectors(states[node], told, weights[node - 1], params)[
            Key.MASKED_PARAMETERS
        ]
        masked_bytes += sum(map(len, content))
        arrays = [bytes_to_ndarray(each) for each in content]
        total = arrays if total is None else arithmetic.parameters_addition(total, arrays)
    total = arithmetic.parameters_mod(total, modulus)
    shares: dict[int, list[bytes]] = {node: [] for node in nodes}
    for node in sorted(alive):
        told = {
            Key.ACTIVE_NODE_ID_LIST: sorted(hoods[node] & alive),
            Key.DEAD_NODE_ID_LIST: sorted(hoods[node] - alive),
        }
        answer = mod._unmask(states[node], ConfigRecord(told))
        for owner, share in zip(answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST], strict=True):
            shares[owner].append(share)
    total = _unmask_flower(total, shares, alive, hoods, public, modulus)
    ratio, values = arithmetic.factor_extract(arithmetic.parameters_mod(total, modulus))
    mean = dequantize(values, BOUND, levels)[0] * (levels / ratio)
    return {"bytes": masked_bytes, "mean": mean}


def _unmask_flower(total: Any, shares: Any, alive: Any, hoods: Any, public: Any, modulus: int) -> Any:
    from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    shapes = arithmetic.get_parameters_shape(total)
    for owner, held in shares.items():
        secret = combine_shares(held)
        if owner in alive:
            mask = pseudo_rand_gen(secret, modulus, shapes)
            total = arithmetic.parameters_subtraction(total, mask)
            continue
        for other in (hoods[owner] & alive) - {owner}:
            key = generate_shared_key(bytes_to_private_key(secret), bytes_to_public_key(public[other][0]))
            mask = pseudo_rand_gen(key, modulus, shapes)
            combine = arithmetic.parameters_addition if owner > other else arithmetic.parameters_subtraction
            total = combine(total, mask)
    return total
