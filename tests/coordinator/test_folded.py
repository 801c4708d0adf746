"""What a relay passes on is taken only if it is what its figures allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.rounds import folded, intake
from coordinator.rounds.folded import BadFold
from edge_client.wire import arrays
from edge_client.wire.relays import Figures, FoldRequest, Member
from strategies import presets
from strategies.params import flatten
from strategies.relays import RelayedMeanFold, RelayedRuleFold, add_relays, fold_part, parts
from strategies.summation import clamp
from strategies.update import Update
from tests.support.federation import PARAMS, update

TRAINED = {"w": PARAMS["w"]}
EXPECTED = intake.make_expected(TRAINED, {})
TASK = "a-task"


def cohort(size: int) -> dict[int, Update]:
    return {at: update(TRAINED, seed=at, num_examples=3 + at) for at in range(size)}


def figures(updates: Mapping[int, Update]) -> dict[int, Figures]:
    return {
        at: Figures("0" * 64, "0" * 64, 1, each.num_examples, each.num_steps, each.train_loss, each.norm)
        for at, each in updates.items()
    }


def ask(name: str, start: int, stop: int, members: Mapping[int, Update], **options: float) -> FoldRequest:
    listed = tuple(Member(at, f"task-{at}") for at in members if start <= at < stop)
    return FoldRequest(name, options, start, stop, 5, listed)


def answer(request: FoldRequest, updates: Mapping[int, Update], file: Path, factor: float = 1.0) -> Path:
    """What a relay writes; one that lies multiplies its sums by `factor`."""
    strategy = folded.strategy_of(request)
    mine = {
        each.position: strategy.transform(clamp(updates[each.position], request.weight_limit))
        for each in request.members
    }
    results = fold_part(strategy, request.start, request.stop, mine)
    tensors = flatten({str(at): flatten(result) for at, result in enumerate(results)})
    arrays.write(file, {name: factor * tensors[name] for name in tensors}, {"task": TASK}, dtype="F64")
    return file


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=4, max_size=20).filter(any), st.integers(1, 4), st.booleans())
def test_parts_of_relays_give_the_bits_of_the_flat_mean(
    tmp_path_factory: pytest.TempPathFactory, present: list[bool], relays: int, clips: bool
) -> None:
    options = {"clip_norm": 0.1} if clips else {}
    flat = presets.get("fedavg", **options)
    updates = {at: each for at, each in cohort(len(present)).items() if present[at]}
    whole, relayed = flat.start(len(present)), add_relays(flat, relays).start(len(present))
    assert isinstance(relayed, RelayedMeanFold)
    for at, each in updates.items():
        whole.add(at, flat.transform(clamp(each, 5)))
    file = tmp_path_factory.mktemp("relay") / "answer"
    for start, stop in reversed(parts(len(present), relays)):
        request = ask("fedavg", start, stop, updates, **options)
        payload = arrays.BytesPayload(answer(request, updates, file).read_bytes())
        relayed.add_part(folded.read_part(payload, TASK, request, figures(updates), EXPECTED))
    expected, got = whole.finish(), relayed.finish()
    assert got.delta["w"].tobytes() == expected.delta["w"].tobytes()
    assert (got.num_examples, got.train_loss) == (expected.num_examples, expected.train_loss)


def test_a_robust_rule_is_applied_by_each_relay_and_to_their_results(tmp_path: Path) -> None:
    single = presets.get("median", malicious=1)
    updates = cohort(9)
    whole, relayed = add_relays(single, 3, 1).start(9), add_relays(single, 3, 1).start(9)
    assert isinstance(relayed, RelayedRuleFold)
    for at, each in updates.items():
        whole.add(at, clamp(each, 5))
    for start, stop in parts(9, 3):
        request = ask("median", start, stop, updates, malicious=1)
        payload = arrays.BytesPayload(answer(request, updates, tmp_path / "answer").read_bytes())
        relayed.add_part(folded.read_part(payload, TASK, request, figures(updates), EXPECTED))
    assert relayed.finish().delta["w"].tobytes() == whole.finish().delta["w"].tobytes()


def test_a_relay_with_too_few_updates_for_the_rule_has_nothing_to_pass_on() -> None:
    updates = cohort(2)
    request = ask("median", 0, 2, updates, malicious=1)
    assert folded.count_results(request, figures(updates)) == 0
    part = folded.empty_part(request, figures(updates))
    assert (part.results, sorted(part.updates)) == ([], [0, 1])


@pytest.mark.parametrize(
    ("factor", "refused"), [(1.0, False), (0.5, False), (-1.0, False), (20.0, True), (np.nan, True)]
)
def test_a_sum_is_at_most_as_long_as_the_updates_that_were_named(
    tmp_path: Path, factor: float, refused: bool
) -> None:
    same = {at: replace(update(TRAINED, seed=1), num_examples=4) for at in range(4)}
    request = ask("fedavg", 0, 4, same)
    payload = arrays.FilePayload(answer(request, same, tmp_path / "answer", factor))
    if not refused:
        folded.read_part(payload, TASK, request, figures(same), EXPECTED)
        return
    with pytest.raises(BadFold, match=r"the norms of its updates allow|holds NaN or infinity"):
        folded.read_part(payload, TASK, request, figures(same), EXPECTED)


def test_weights_follow_from_the_figures_and_the_limit_of_the_round(tmp_path: Path) -> None:
    updates = cohort(4)  # 3, 4, 5 and 6 examples; 5 is the limit
    request = ask("fedavg", 0, 4, updates)
    payload = arrays.FilePayload(answer(request, updates, tmp_path / "answer"))
    part = folded.read_part(payload, TASK, request, figures(updates), EXPECTED)
    assert [part.updates[at].num_examples for at in range(4)] == [3, 4, 5, 5]


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "'0/delta/w' is missing, 0 of 1 tensors arrived"),
        ({"0/delta/w": np.zeros((2, 3)), "1/delta/w": np.zeros((2, 3))}, "'1/delta/w' is not a tensor"),
        ({"0/delta/w": np.zeros((2, 3), np.float32)}, "0/delta/w is F32, expected F64"),
        ({"0/delta/w": np.zeros((3, 2))}, r"0/delta/w is \(3, 2\), expected \(2, 3\)"),
    ],
)
def test_an_answer_of_another_form_is_refused(tensors: dict[str, np.ndarray], words: str) -> None:
    updates = cohort(4)
    request = ask("fedavg", 0, 4, updates)
    payload = arrays.BytesPayload(arrays.encode(tensors, {"task": TASK}))
    with pytest.raises(BadFold, match=words):
        folded.read_part(payload, TASK, request, figures(updates), EXPECTED)
    other = arrays.BytesPayload(arrays.encode({}, {"task": "another"}))
    with pytest.raises(BadFold, match="it answers another task"):
        folded.read_part(other, TASK, request, figures(updates), EXPECTED)
    with pytest.raises(BadFold, match="too short for a header"):
        folded.read_part(arrays.BytesPayload(b""), TASK, request, figures(updates), EXPECTED)
