"""Laws of dealing rows out: each training row once, nobody empty, the same seed the same hands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.datasets import (
    DataError,
    Dataset,
    client_names,
    load,
    owners,
    parse_partition,
    partition,
    public_rows,
)
from models.datasets.partitioners import Partition

Deal = tuple[Dataset, str, int, int]
SPECS = ("iid", "shards(2)", "dirichlet(0.001)", "dirichlet(0.3)", "dirichlet(100)")


def labelled(labels: list[int], sites: list[int] | None = None, test: list[bool] | None = None) -> Dataset:
    count = len(labels)
    names = tuple(f"site {index}" for index in range(max(sites) + 1)) if sites else ()
    return Dataset(
        name="made",
        x=np.zeros((count, 1), np.float32),
        y=np.array(labels, np.int32),
        test=np.array(test or [False] * count),
        classes=max([*labels, 1]) + 1,
        site=None if sites is None else np.array(sites, np.int32),
        site_names=names,
    )


def sequences(count: int, sites: list[int] | None = None) -> Dataset:
    base = labelled([0] * count, sites)
    tokens = np.zeros((count, 4), np.int32)
    return Dataset(
        "made", tokens, tokens, np.arange(count) % 5 == 0, 2, "next_token", (), base.site, base.site_names
    )


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    """A data set, a partition, as many clients as it has rows for, and a seed."""
    labels = draw(st.lists(st.integers(0, 5), min_size=4, max_size=150))
    test = draw(st.lists(st.booleans(), min_size=len(labels), max_size=len(labels)))
    test[:2] = [False, False]
    spec = draw(st.sampled_from(SPECS))
    room = test.count(False) // (2 if spec == "shards(2)" else 1)
    return labelled(labels, test=test), spec, draw(st.integers(1, max(1, room))), draw(st.integers(0, 2**32))


@given(deals())
def test_every_training_row_goes_to_exactly_one_client_and_nobody_is_empty(deal: Deal) -> None:
    dataset, spec, clients, seed = deal
    parts = partition(spec, dataset, clients=clients, seed=seed)
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= 1
    assert np.array_equal(np.sort(np.concatenate(parts)), np.flatnonzero(~dataset.test))
    assert all((np.diff(part) > 0).all() for part in parts)


@given(deals())
def test_the_same_seed_deals_the_same_hands(deal: Deal) -> None:
    dataset, spec, clients, seed = deal
    one = partition(spec, dataset, clients=clients, seed=seed)
    two = partition(spec, dataset, clients=clients, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("spec", ["iid", "shards(2)", "dirichlet(0.3)"])
def test_another_seed_deals_other_hands(spec: str) -> None:
    digits = load("digits")
    one, two = (partition(spec, digits, clients=20, seed=seed) for seed in (1, 2))
    assert any(not np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@given(deals(), st.data())
def test_rows_set_aside_go_to_nobody(deal: Deal, data: st.DataObject) -> None:
    dataset, spec, _, seed = deal
    training = np.flatnonzero(~dataset.test)
    count = data.draw(st.integers(0, len(training) - 2))
    aside = public_rows(dataset, count, seed)
    parts = partition(spec, dataset, clients=1, seed=seed, exclude=aside)
    assert np.array_equal(np.concatenate(parts), np.setdiff1d(training, aside))


def test_iid_hands_differ_by_one_row_at_most() -> None:
    sizes = [len(part) for part in partition("iid", labelled([0, 1] * 51), clients=10, seed=0)]
    assert sorted(sizes) == [10] * 8 + [11] * 2


@given(st.integers(1, 4), st.integers(2, 12), st.integers(0, 2**32))
def test_a_client_of_n_shards_sees_few_labels(each: int, clients: int, seed: int) -> None:
    labels = np.repeat(np.arange(10), 50).tolist()
    dataset = labelled(labels)
    shard = -(-len(labels) // (clients * each))
    for part in partition(f"shards({each})", dataset, clients=clients, seed=seed):
        # A run of `shard` sorted rows touches at most 1 + ceil((shard - 1) / 50) of the labels.
        assert len(np.unique(dataset.y[part])) <= each * (1 + -(-(shard - 1) // 50))
        assert abs(len(part) - len(labels) / clients) <= each


def test_small_alpha_parts_the_classes_and_large_alpha_is_nearly_iid() -> None:
    dataset = labelled((np.arange(20_000) % 10).tolist())

    def skew(alpha: float) -> float:
        """Mean over clients of the largest share one class has of a client's rows."""
        parts = partition(f"dirichlet({alpha})", dataset, clients=10, seed=5)
        return float(np.mean([np.bincount(dataset.y[part]).max() / len(part) for part in parts]))

    skews = [skew(alpha) for alpha in (0.01, 0.1, 1, 10, 1000)]
    assert skews == sorted(skews, reverse=True)
    assert skews[0] > 0.6
    # A share of a class is Beta(1000, 9000): 0.1 with a standard deviation of 0.003, and this is the largest of ten.
    assert skews[-1] < 0.11
    sizes = [len(part) for part in partition("dirichlet(1000000)", dataset, clients=10, seed=5)]
    assert max(sizes) - min(sizes) <= 40


def test_dirichlet_proportions_have_the_distributions_moments() -> None:
    # A client's share p of a class is Beta(alpha, (K - 1) alpha): mean 1/K, variance (1/K)(1 - 1/K) / (K alpha + 1).
    clients, alpha, classes, rows = 5, 0.5, 200, 400
    dataset = labelled(np.repeat(np.arange(classes), rows).tolist())
    parts = partition(f"dirichlet({alpha})", dataset, clients=clients, seed=11)
    shares = np.stack([np.bincount(dataset.y[part], minlength=classes) for part in parts]) / rows
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    # 200 classes: the mean's standard error is sqrt(variance / 200) = .015, the variance's about .005.
    assert np.allclose(shares.mean(axis=1), 1 / clients, atol=4 * np.sqrt(variance / classes))
    assert abs(shares.var(axis=1).mean() - variance) < 0.015


def test_natural_clients_are_the_sites_in_order() -> None:
    dataset = labelled([0, 1, 0, 1, 0, 1], sites=[1, 0, 1, 0, 2, 2])
    parts = partition("natural", dataset, clients=None, seed=0)
    assert [part.tolist() for part in parts] == [[1, 3], [0, 2], [4, 5]]
    assert client_names("natural", dataset, 3) == ["site 0", "site 1", "site 2"]
    assert partition("natural", dataset, clients=3, seed=1)[0].tolist() == [1, 3]


def test_other_clients_are_numbered() -> None:
    dataset = labelled([0, 1])
    assert client_names("iid", dataset, 2) == ["client-000", "client-001"]
    assert client_names("iid", dataset, 1001)[-1] == "client-1000"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichlet(0)", "alpha = 0, expected a number from 0.001 to"),
        ("dirichlet(-1)", "alpha = -1, expected"),
        ("dirichlet(1e9)", "alpha = 1000000000.0, expected"),
        ("dirichlet('a')", "alpha = 'a', expected"),
        ("dirichlet(True)", "alpha = True, expected"),
        ("dirichlet", "needs one value, alpha from 0.001"),
        ("dirichlet(beta=1)", "needs one value, alpha"),
        ("dirichlet(1, 2)", "needs one value, alpha"),
        ("dirichlet(nan)", "not of the form"),
        ("shards(0)", "n = 0, expected a number from 1 to 10000"),
        ("shards(1.5)", "1.5 shards, expected a whole number"),
        ("shards()", "needs one value, n from 1"),
        ("iid(3)", "iid takes no value"),
        ("natural()", "natural takes no value"),
        ("dirchlet(0.3)", "did you mean 'dirichlet'"),
        ("IID", "did you mean 'iid'"),
        ("", "known: iid, shards"),
    ],
)
def test_a_bad_partition_is_reported_with_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_partition(spec)


def test_partitions_are_parsed_to_values() -> None:
    assert parse_partition("dirichlet(0.3)") == parse_partition(" dirichlet(alpha = 0.3) ")
    assert parse_partition("dirichlet(1)") == Partition("dirichlet", alpha=1.0)
    assert parse_partition("shards(2)") == Partition("shards", shards=2)
    assert parse_partition("iid") == Partition("iid")


@pytest.mark.parametrize(
    ("make", "spec", "clients", "message"),
    [
        (lambda: labelled([0, 1, 0]), "iid", 4, "4 clients cannot share 3 training rows"),
        (lambda: labelled([0, 1, 0]), "shards(2)", 2, "2 clients with 2 shards each need 4 training rows, there are 3"),
        (lambda: labelled([0, 1]), "iid", None, "needs the number of clients"),
        (lambda: labelled([0, 1]), "iid", 0, "needs the number of clients"),
        (lambda: labelled([0, 1]), "natural", None, "needs sites, and 'made' has none"),
        (lambda: labelled([0, 1, 0], [0, 1, 0]), "natural", 3, "2 of them, but 3 clients are requested"),
        (lambda: labelled([0, 1], [0, 1], [False, True]), "natural", None, "site 'site 1' of 'made' has no training row"),
        (lambda: sequences(9), "shards(2)", 2, "use iid or natural"),
        (lambda: sequences(9), "dirichlet(1)", 2, "use iid or natural"),
    ],
)  # fmt: skip
def test_impossible_partitions_are_explained(
    make: Callable[[], Dataset], spec: str, clients: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        partition(spec, make(), clients=clients, seed=0)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=100), st.data())
def test_public_rows_are_balanced_over_the_classes(labels: list[int], data: st.DataObject) -> None:
    dataset = labelled(labels)
    count = data.draw(st.integers(0, len(labels) - 1))
    rows = public_rows(dataset, count, data.draw(st.integers(0, 2**32)))
    assert len(np.unique(rows)) == count
    taken, there = (np.bincount(dataset.y[chosen], minlength=5) for chosen in (rows, np.arange(len(labels))))
    # One row is always kept. A class that certainly has another to give is at most one behind the fullest.
    able = there - taken > 1
    assert (taken[able] >= taken.max() - 1).all()


def test_public_rows_never_empty_a_site() -> None:
    dataset = labelled([0, 1] * 10, sites=[0] * 15 + [1, 2, 3, 4, 4])
    rows = public_rows(dataset, 15, seed=3)
    parts = partition("natural", dataset, clients=None, seed=0, exclude=rows)
    assert [len(part) for part in parts] == [1, 1, 1, 1, 1]
    with pytest.raises(DataError, match="can spare 0 to 15 of its 20 training rows"):
        public_rows(dataset, 16, seed=3)


def test_public_rows_are_never_test_rows() -> None:
    digits = load("digits", seed=2)
    rows = public_rows(digits, 150, seed=2)
    assert not digits.test[rows].any()
    assert np.bincount(digits.y[rows]).tolist() == [15] * 10


def test_held_out_rows_of_natural_clients_belong_to_their_site() -> None:
    dataset = labelled([0, 1] * 6, sites=[0, 1, 2] * 4, test=[False] * 6 + [True] * 6)
    parts = partition("natural", dataset, clients=None, seed=0)
    assert owners(dataset, parts, seed=0).tolist() == [0, 1, 2, 0, 1, 2]


def test_held_out_rows_go_where_their_class_is_trained_on() -> None:
    labels = [0] * 40 + [1] * 40 + [0] * 3000 + [1] * 3000
    dataset = labelled(labels, test=[False] * 80 + [True] * 6000)
    parts = [np.arange(0, 30), np.arange(30, 50), np.arange(50, 80)]  # 30 zeros; 10 of each; 30 ones
    owner = owners(dataset, parts, seed=4)
    shares = np.stack([np.bincount(owner[start : start + 3000], minlength=3) / 3000 for start in (0, 3000)])
    # Standard error sqrt(.25 * .75 / 3000) = .008.
    assert np.allclose(shares, [[0.75, 0.25, 0], [0, 0.25, 0.75]], atol=0.032)
    assert owner.dtype == np.int32
    assert np.array_equal(owner, owners(dataset, parts, seed=4))
    assert not np.array_equal(owner, owners(dataset, parts, seed=5))


def test_a_class_nobody_trains_on_goes_by_size() -> None:
    dataset = labelled([0] * 10 + [1] * 4000, test=[False] * 10 + [True] * 4000)
    owner = owners(dataset, [np.arange(9), np.arange(9, 10)], seed=0)
    assert abs((owner == 0).mean() - 0.9) < 0.02


def test_sequences_go_by_the_clients_sizes() -> None:
    dataset = sequences(10_000)
    training = np.flatnonzero(~dataset.test)
    owner = owners(dataset, [training[:2000], training[2000:]], seed=0)
    assert len(owner) == 2000
    assert abs((owner == 0).mean() - 0.25) < 0.04


def test_speakers_own_their_held_out_lines(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text(
        "".join(f"{name}:\n{name * 40}\n\n" for name in ("ANN", "BOB", "CY"))
    )
    plays = load("shakespeare", data_dir=tmp_path, length=8)
    parts = partition("natural", plays, clients=None, seed=0)
    assert plays.site is not None
    assert np.array_equal(owners(plays, parts, seed=0), plays.site[plays.test])
