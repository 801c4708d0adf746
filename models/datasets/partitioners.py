"""Which training rows each client holds, `iid`, `shards(n)`, `dirichlet(alpha)` or `natural`; whose the held-out rows are;
and the rows that are set aside for the server to pretrain or distil on.

Every training row that is not set aside goes to exactly one client, and every client gets at least one. The
same seed deals the same hands.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from models.datasets import notation
from models.datasets.dataset import DataError, Dataset
from models.datasets.holdout import stream
from strategies.suggestions import suggest

Rows = npt.NDArray[np.int64]
Kind = Literal["iid", "shards", "dirichlet", "natural"]

KINDS: tuple[Kind, ...] = ("iid", "shards", "dirichlet", "natural")
FORMS = "iid, shards(2), dirichlet(0.3) or natural"
SHARDS = (1, 10_000)
ALPHA = (0.001, 1_000_000.0)


@dataclass(frozen=True)
class Partition:
    """A way to deal rows out.

    Attributes:
        shards: for `shards`, how many each client gets.
        alpha: for `dirichlet`, the concentration: small is one class a client, large is iid.
    """

    kind: Kind
    shards: int = 0
    alpha: float = 0.0


def partition(
    spec: str, dataset: Dataset, *, clients: int | None, seed: int, exclude: Rows | None = None
) -> list[Rows]:
    """Row indices of each client, ascending, in the order of the clients.

    Args:
        clients: how many; None only with `natural`, where it is the number of sites.
        exclude: training rows set aside, which no client gets.

    Raises:
        DataError: unknown or out of range, too few rows for the clients, no sites for `natural`, or labels
            that are sequences where one label a row is needed.
    """
    chosen = parse_partition(spec)
    free = ~dataset.test
    if exclude is not None:
        free[exclude] = False
    rows = np.flatnonzero(free)
    if chosen.kind == "natural":
        return _natural(dataset, rows, clients)
    count = _client_count(chosen, clients, len(rows))
    rng = stream(seed, f"partition {chosen.kind}")
    if chosen.kind == "iid":
        parts = np.array_split(rng.permutation(rows), count)
    else:
        y = _one_label_a_row(chosen, dataset)[rows]
        if chosen.kind == "shards":
            parts = _shards(rows, y, count, chosen.shards, rng)
        else:
            parts = _dirichlet(rows, y, count, chosen.alpha, rng)
    return [np.sort(part) for part in parts]


def parse_partition(text: str) -> Partition:
    """The partition that `text` names.

    Raises:
        DataError: unknown name, with the nearest known, or a value out of its range.
    """
    call = notation.parse(text)
    values = (*call.positional, *call.named.values())
    match call.name:
        case "iid" | "natural" as kind if not values and "(" not in text:
            return Partition(kind)
        case "iid" | "natural":
            raise DataError(f"partition {text!r}: {call.name} takes no value; write {call.name}")
        case "shards":
            count = _value(text, call, "n", *SHARDS)
            if not isinstance(count, int):
                raise DataError(f"partition {text!r}: {count!r} shards, expected a whole number")
            return Partition("shards", shards=count)
        case "dirichlet":
            return Partition("dirichlet", alpha=float(_value(text, call, "alpha", *ALPHA)))
    raise DataError(f"partition {text!r} is unknown{suggest(call.name, KINDS)}; known: {FORMS}")


def client_names(spec: str, dataset: Dataset, clients: int) -> list[str]:
    """What the clients are called, in order: their sites, or `client-000`, `client-001`, …"""
    if parse_partition(spec).kind == "natural":
        return list(dataset.site_names)
    width = max(3, len(str(clients - 1)))
    return [f"client-{index:0{width}d}" for index in range(clients)]


def _value(text: str, call: notation.Call, name: str, least: float, most: float) -> int | float:
    values = [*call.positional, *(value for key, value in call.named.items() if key == name)]
    if len(values) != 1 or len(values) != len(call.positional) + len(call.named):
        raise DataError(
            f"partition {text!r} needs one value, {name} from {least:g} to {most:g}; known: {FORMS}"
        )
    value = values[0]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise DataError(
            f"partition {text!r}: {name} = {value!r}, expected a number from {least:g} to {most:g}"
        )
    return value


def _client_count(chosen: Partition, clients: int | None, rows: int) -> int:
    if clients is None or clients < 1:
        raise DataError(f"partition {chosen.kind} needs the number of clients, 1 or more; got {clients}")
    if clients > rows:
        raise DataError(
            f"{clients:,} clients cannot share {rows:,} training rows; ask for at most {rows:,} clients"
        )
    return clients


def _one_label_a_row(chosen: Partition, dataset: Dataset) -> npt.NDArray[np.int32]:
    if dataset.y.ndim != 1:
        raise DataError(
            f"partition {chosen.kind} deals by label, and rows of {dataset.name!r} have a label for each token; "
            "use iid or natural"
        )
    if dataset.task == "regression":
        raise DataError(
            f"partition {chosen.kind} deals by class, and the labels of {dataset.name!r} are quantities; use iid or natural"
        )
    return dataset.y


def _has_classes(dataset: Dataset) -> bool:
    """Whether every row is of one class."""
    return dataset.task == "classification"


def _natural(dataset: Dataset, rows: Rows, clients: int | None) -> list[Rows]:
    if dataset.site is None:
        raise DataError(
            f"partition natural needs sites, and {dataset.name!r} has none; use iid, shards(n) or dirichlet(alpha)"
            + (", or name the column of the sites" if dataset.name == "csv" else "")
        )
    sites = len(dataset.site_names)
    if clients is not None and clients != sites:
        raise DataError(
            f"partition natural has one client a site, {sites} of them, but {clients} clients are requested; "
            "leave the number of clients out, or deal the rows out by another partition: iid, shards(n) or dirichlet(alpha)"
        )
    site = dataset.site[rows]
    order = np.argsort(site, kind="stable")
    sizes = np.bincount(site, minlength=sites)
    for index in np.flatnonzero(sizes == 0):
        raise DataError(
            f"site {dataset.site_names[index]!r} of {dataset.name!r} has no training row; "
            "give it some, or leave the site out"
        )
    return np.split(rows[order], np.cumsum(sizes)[:-1])


def _shards(
    rows: Rows, y: npt.NDArray[np.int32], clients: int, each: int, rng: np.random.Generator
) -> list[Rows]:
    """Rows sorted by label and cut into `clients` x `each` shards, `each` to a client. McMahan 2017, section 3.

    Which rows of a label share a shard is random; sizes of shards differ by at most one row.
    """
    count = clients * each
    if count > len(rows):
        raise DataError(
            f"{clients:,} clients with {each:,} shards each need {count:,} training rows, there are {len(rows):,}"
        )
    shuffled = rng.permutation(len(rows))
    ordered = rows[shuffled[np.argsort(y[shuffled], kind="stable")]]
    shards = np.array_split(ordered, count)
    return [
        np.concatenate([shards[index] for index in hand])
        for hand in rng.permutation(count).reshape(clients, each)
    ]


def _dirichlet(
    rows: Rows, y: npt.NDArray[np.int32], clients: int, alpha: float, rng: np.random.Generator
) -> list[Rows]:
    """Each class is divided over the clients in proportions drawn from Dir(alpha, …, alpha).

    Hsu 2019 (arXiv:1909.06335) draws each client's mix of classes and lets clients be of one size, which leaves rows
    over. Drawing each class's mix of clients (Yurochkin 2019, arXiv:1905.12022) places every row once, and makes
    clients of unequal sizes as well. A client left empty gets a row of the largest.
    """
    ordered: list[Rows] = []
    owners: list[npt.NDArray[np.int32]] = []
    for label in np.unique(y):
        members = rng.permutation(rows[y == label])
        bounds = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha)))[:-1] * len(members)).astype(
            np.int64
        )
        ordered.append(members)
        counts = np.diff(bounds, prepend=0, append=len(members))
        owners.append(np.repeat(np.arange(clients, dtype=np.int32), counts))
    owner = np.concatenate(owners)
    dealt = np.concatenate(ordered)[np.argsort(owner, kind="stable")]
    ends = np.cumsum(np.bincount(owner, minlength=clients))[:-1]
    return _none_empty([rng.permutation(hand) for hand in np.split(dealt, ends)])


def _none_empty(parts: Sequence[Rows]) -> list[Rows]:
    """Each empty part gets the last row of what is then the largest; of equals, the first."""
    kept = [len(part) for part in parts]
    largest = [(-size, index) for index, size in enumerate(kept)]
    heapq.heapify(largest)
    result = list(parts)
    for empty in (index for index, size in enumerate(kept) if size == 0):
        _, giver = heapq.heappop(largest)
        kept[giver] -= 1
        heapq.heappush(largest, (-kept[giver], giver))
        result[empty] = parts[giver][kept[giver] : kept[giver] + 1]
    return [part[:size] if size else part for part, size in zip(result, kept, strict=True)]


def owners(dataset: Dataset, parts: Sequence[npt.NDArray[np.int64]], seed: int) -> npt.NDArray[np.int32]:
    """The client of each test row, in the order of `np.flatnonzero(dataset.test)`.

    Where clients are the sites, a row's site. Otherwise a row is assigned to a client at random, with probability
    proportional to how many training rows of its class the client holds, so that each client is tested on the
    mix it trains on; sequences, quantities, and classes that no client trains on, are assigned by the clients' sizes.

    `parts`: training rows of each client.
    """
    test = np.flatnonzero(dataset.test)
    if dataset.site is not None and _by_site(dataset.site, parts, len(dataset.site_names)):
        return dataset.site[test].astype(np.int32)
    rng = stream(seed, "owners")
    label = dataset.y if _has_classes(dataset) else np.zeros(len(dataset.y), np.int32)
    classes = int(label.max()) + 1
    held = np.stack([np.bincount(label[part], minlength=classes) for part in parts])
    held[:, held.sum(axis=0) == 0] = np.array([[len(part)] for part in parts])
    drawn = rng.random(len(test))
    owner = np.empty(len(test), np.int32)
    for one in np.unique(label[test]):
        rows = label[test] == one
        upto = np.cumsum(held[:, one])
        owner[rows] = np.searchsorted(upto, drawn[rows] * upto[-1], side="right")
    return owner


def _by_site(site: npt.NDArray[np.int32], parts: Sequence[npt.NDArray[np.int64]], sites: int) -> bool:
    return len(parts) == sites and all((site[part] == index).all() for index, part in enumerate(parts))


def public_rows(dataset: Dataset, count: int, seed: int) -> npt.NDArray[np.int64]:
    """`count` training rows, ascending, with classes as equal in number as the data allows.

    Sequences and quantities have no class and are drawn evenly. A site's last training row is never taken.

    Raises:
        DataError: `count` is more than can be spared.
    """
    if not count:
        return np.zeros(0, np.int64)
    rng = stream(seed, "public")
    rows = rng.permutation(np.flatnonzero(~dataset.test))
    spare = rows[_turn(dataset.site[rows]) > 0] if dataset.site is not None else rows[1:]
    if not 0 <= count <= len(spare):
        raise DataError(
            f"{count:,} public rows are requested; {dataset.name!r} can spare 0 to {len(spare):,} of its "
            f"{len(rows):,} training rows"
        )
    if _has_classes(dataset):
        # First one of every class, then a second of every class, and so on; within a turn at random.
        spare = spare[np.lexsort((rng.random(len(spare)), _turn(dataset.y[spare])))]
    return np.sort(spare[:count])


def _turn(labels: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[N]: how many earlier places hold the same label."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    starts = np.searchsorted(ordered, ordered, side="left")
    turn = np.empty(len(labels), np.int64)
    turn[order] = np.arange(len(labels)) - starts
    return turn
