"""Gradient inversion on updates of one client, and what the defences of the experiment change.

Two things are attacked: updates of single rows, which leak the most, and the update that the client sends in the first round, from all its
rows. Workers attack (`coordinator.workers.audit.inversion`); what they find is compared with the rows here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coordinator.privacy.audit import similarity
from coordinator.privacy.audit.clients import Audited, Rows, local_updates, single_updates
from coordinator.privacy.audit.defences import View, observe
from coordinator.privacy.audit.outcome import LOCAL, SINGLE, Outcome, Pair
from coordinator.privacy.audit.similarity import Measure
from coordinator.workers.pool import PoolJob
from edge_client.processes.channel import Frame
from edge_client.wire import arrays
from strategies.params import Params
from strategies.update import Update

_REFERENCE_ROWS = 2000
"""Rows of the data from which it is known what rows look like."""
_OTHER_ROWS = 64
"""Rows of nobody in the sum, to guess with."""


@dataclass(frozen=True)
class Attack:
    """An observed update and the rows behind it. `sought`: rows that the attacker reconstructs at most."""

    seen: Params
    rows: Rows
    sought: int


def run(
    audited: Audited, views: Sequence[View], clip_norm: float | None, rows: int, iterations: int
) -> list[Outcome]:
    """The outcome of each kind of update in each view. `clip_norm`: None: the median norm of the updates. `rows`: that are attacked."""
    target = audited.target
    own = audited.rows_of(target)
    chosen = np.sort(audited.rng("rows").choice(own, min(rows, len(own)), replace=False)).tolist()
    group = [index for index in audited.others if len(audited.data.part(index))]
    largest = max(view.group_size for view in views) - 1
    beside = [
        (index, int(audited.rng("row beside", index).choice(audited.rows_of(index))))
        for index in group[:largest]
    ]
    singles = single_updates(audited, [*((target, row) for row in chosen), *beside])
    mine, theirs = singles[: len(chosen)], singles[len(chosen) :]
    whole = local_updates(audited, [target, *group[:largest]])
    outcomes = []
    for view in views:
        count = view.group_size
        clip = clip_norm or float(np.median([each.norm for each in singles]))
        rng = audited.rng(view.defence)
        attacks = [
            Attack(
                observe(view, [update, *theirs], clip, rng),
                np.array([row, *(each for _, each in beside[: count - 1])], np.int64),
                1 if count == 1 else rows,
            )
            # Of a sum one attack is enough, as it seeks all rows behind it.
            for row, update in list(zip(chosen, mine, strict=True))[: 1 if count > 1 else None]
        ]
        outcomes.append(_judge(audited, SINGLE, view, attacks, iterations))
        outcomes.append(
            _judge(
                audited,
                LOCAL,
                view,
                [_on_local_work(audited, view, whole, group, clip_norm, rows)],
                iterations,
            )
        )
    return sorted(outcomes, key=lambda each: each.attacked != SINGLE)


def _on_local_work(
    audited: Audited,
    view: View,
    whole: Sequence[Update],
    group: Sequence[int],
    clip_norm: float | None,
    rows: int,
) -> Attack:
    clip = clip_norm or float(np.median([each.norm for each in whole]))
    members = [audited.target, *group[: view.group_size - 1]]
    behind = np.concatenate([audited.rows_of(index) for index in members])
    seen = observe(view, whole, clip, audited.rng(f"{view.defence}, local work"))
    return Attack(seen, behind, 1 if len(behind) == 1 else rows)


def _judge(
    audited: Audited, attacked: str, view: View, attacks: Sequence[Attack], iterations: int
) -> Outcome:
    """Has workers attack, and compares what they find with the rows."""
    data = audited.data
    is_tokens = audited.prepared.data_info["input_dtype"] == "int32"
    reference = _reference(audited)
    replies = _invert(audited, attacks, reference, iterations, is_tokens)
    labels = [
        _labels(reply.values["labels"], data.y[each.rows], data.y[audited.data.parts])
        for reply, each in zip(replies, attacks, strict=True)
    ]
    known = [each for each in labels if each is not None]
    told, guessed = (float(np.mean([each[at] for each in known])) if known else None for at in (0, 1))
    method = replies[0].values["method"]
    if is_tokens:
        found = [
            similarity.token_score(
                arrays.decode(reply.blobs[0])["tokens"], np.unique(data.x[each.rows]).tolist()
            )
            for reply, each in zip(replies, attacks, strict=True)
        ]
        score = float(np.mean([each for each, _ in found]))
        return Outcome(
            attacked, view, method, "tokens", score, 0.5, None, told, guessed, tokens=tuple(found[0][1])
        )
    measure, rng = Measure.of(reference), audited.rng("guesses")
    matches, pairs = [], []
    for reply, each in zip(replies, attacks, strict=True):
        rows = arrays.decode(reply.blobs[0])["rows"]
        truth = data.x[each.rows]
        others = _others(audited, each.rows, rng)
        match = similarity.match(measure, rows, truth, others, rng)
        matches.append(match)
        pairs += [Pair(np.array(truth[row]), found, value) for found, row, value in match.pairs(rows)]
    middle = float(np.median([each.psnr for each in matches]))
    return Outcome(
        attacked,
        view,
        method,
        measure.name,
        float(np.mean([each.similarity for each in matches])),
        float(np.mean([each.guess for each in matches])),
        middle if np.isfinite(middle) else None,
        told,
        guessed,
        pairs=tuple(pairs),
    )


def _invert(
    audited: Audited,
    attacks: Sequence[Attack],
    reference: npt.NDArray[np.float32],
    iterations: int,
    is_tokens: bool,
) -> list[Frame]:
    """What workers find, in the order of the attacks."""
    audited.pool.publish(audited.prepared.params)
    empty = np.zeros(0, np.float32)
    low, high = (empty, empty) if is_tokens else _bounds(reference)
    bounds = arrays.encode({"low": low, "high": high})
    jobs = (
        PoolJob(
            number,
            {
                "kind": "audit",
                "work": "invert",
                "rows": each.sought,
                "iterations": iterations,
                "seed": int(audited.rng("attack", number).integers(2**31)),
            },
            (arrays.encode(each.seen), bounds),
        )
        for number, each in enumerate(attacks)
    )
    found = {job.key: reply for job, reply in audited.pool.run(jobs)}
    return [found[number] for number in range(len(attacks))]


def _reference(audited: Audited) -> npt.NDArray[np.float32]:
    """Rows of the data in general."""
    parts = audited.data.parts
    chosen = audited.rng("reference").choice(parts, min(_REFERENCE_ROWS, len(parts)), replace=False)
    return np.asarray(audited.data.x[np.sort(chosen)], np.float32)


def _bounds(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Least and greatest value of each number of a row; of images one range for all pixels."""
    low, high = rows.min(axis=0), rows.max(axis=0)
    if rows.ndim > 2:
        return np.full_like(low, low.min()), np.full_like(high, high.max())
    return low, high


def _others(audited: Audited, rows: Rows, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Rows that are not behind the update; all rows if there are no others."""
    known = np.concatenate([audited.data.parts, audited.data.test_rows])
    free = np.setdiff1d(known, rows)
    free = free if len(free) else known
    return np.asarray(
        audited.data.x[rng.choice(free, min(_OTHER_ROWS, len(free)), replace=False)], np.float32
    )


def _labels(
    found: Sequence[int], truth: npt.NDArray[Any], population: npt.NDArray[Any]
) -> tuple[float, float] | None:
    """How much of the distribution of labels an attacker knows: from the update, and from that of all rows. 1: all of it."""
    if not found:
        return None
    count = int(max(population.max(), max(found))) + 1
    shares = [
        np.bincount(np.asarray(each, np.int64), minlength=count) / len(each)
        for each in (found, truth, population)
    ]
    return tuple(1 - float(np.abs(each - shares[1]).sum()) / 2 for each in (shares[0], shares[2]))  # type: ignore[return-value]
