"""Clients with models of their own: what stays on a client, what is sent, and what both become."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from edge_client.data.examples import Examples
from edge_client.train.torch_trainer import load, read
from edge_client.train.trainer import LocalResult, Trainer, TrainTask
from models.zoo import mlp, resnet8
from strategies import presets
from strategies.client_rules import ClientRule, PlainSGD
from strategies.params import Params, State, materialize
from strategies.personalisation import (
    HeadThenBody,
    LocalTensors,
    NothingToShare,
    PersonalModel,
    PersonalRule,
    UnknownRule,
    find_local,
    from_options,
)
from tests.support.local_data import examples, first_params, noise_like, torch_runtime

SPEC = mlp.spec((6,), 3, hidden=[5])
HEAD = ("fc.weight", "fc.bias")
BODY = ("hidden.0.weight", "hidden.0.bias")
ROWS = 12
LOCAL_RULES = [LocalTensors(("fc.*",)), HeadThenBody(("fc.*",), 2)]


def train(
    rule: ClientRule, params: Params, state: dict[str, Params], seed: int = 1, steps: int = 3
) -> LocalResult:
    data = examples((6,), 3, ROWS, seed=seed)
    task = TrainTask(seed=5, batch_size=ROWS, lr=0.3, steps=steps, rule=rule)
    return Trainer(torch_runtime(SPEC)).train(params, task, data, state)


def same_bits(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


# -- which tensors are local --


def test_patterns_are_of_whole_names() -> None:
    assert find_local(["fc.*"], [*BODY, *HEAD]) == HEAD
    assert find_local(["*.bias"], [*BODY, *HEAD]) == ("hidden.0.bias", "fc.bias")


@pytest.mark.parametrize(
    ("patterns", "reason"),
    [
        (("fc", "FC.*"), "no trained tensor matches; there are hidden.0.weight,"),
        (("*",), "every trained tensor"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused_with_the_tensors(
    patterns: Sequence[str], reason: str
) -> None:
    with pytest.raises(NothingToShare, match=reason):
        find_local(patterns, [*BODY, *HEAD])


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_each_pattern_of_the_experiment_must_match_but_not_each_of_the_default(name: str) -> None:
    assert presets.share(presets.get(name), [*BODY, *HEAD]) == BODY
    with pytest.raises(presets.OptionError, match=r"'head\.\*' matches no trained tensor; there are hidden"):
        presets.share(presets.get(name, local=["fc.bias", "head.*"]), [*BODY, *HEAD])


def test_normalization_layers_are_local_by_default_and_a_model_without_is_refused() -> None:
    trainable = torch_runtime(resnet8.spec((8, 8), 10, width=4)).trainable
    left = set(trainable) - set(presets.share(presets.get("fedbn"), trainable))
    assert left == {name for name in trainable if "norm" in name} and len(left) == 14
    with pytest.raises(presets.OptionError, match="FedBN is for models with normalization layers"):
        presets.share(presets.get("fedbn"), [*BODY, *HEAD])


@pytest.mark.parametrize(
    "options",
    [
        {"name": "local_tensors", "local": "fc.*"},
        {"name": "local_tensors", "local": []},
        {"name": "local_tensors", "local": [1]},
        {"name": "head_then_body", "local": ["fc.*"], "head_epochs": 0},
        {"name": "head_then_body", "local": ["fc.*"], "head_epochs": 1.5},
        {"name": "personal_model", "mu": -1},
    ],
)
def test_a_client_refuses_a_task_with_a_senseless_rule(options: dict[str, object]) -> None:
    with pytest.raises(UnknownRule, match=str(options["name"])):
        from_options(options)


# -- what is sent, what is kept --


@pytest.mark.parametrize("rule", LOCAL_RULES, ids=lambda rule: rule.name)
def test_an_update_has_no_local_tensor_and_the_global_ones_keep_their_values(rule: ClientRule) -> None:
    params = first_params(SPEC)
    result = train(rule, params, {})
    assert set(result.update.delta) == set(BODY) and result.update.extras == {}
    assert set(result.client_state["local"]) == set(HEAD)
    strategy = presets.get("fedper")
    fold = strategy.start(1)
    fold.add(0, strategy.transform(result.update))
    moved, _ = strategy.apply(params, State(), fold.finish(), num_clients=1)
    assert same_bits({name: moved[name] for name in HEAD}, {name: params[name] for name in HEAD})
    assert not any(np.array_equal(moved[name], params[name]) for name in BODY)


@pytest.mark.parametrize("rule", LOCAL_RULES, ids=lambda rule: rule.name)
def test_a_client_goes_on_with_its_local_tensors_whatever_the_global_ones_are(rule: ClientRule) -> None:
    params = first_params(SPEC)
    kept = train(rule, params, {}).client_state
    other = params | {name: params[name] + 1 for name in HEAD}
    first, second = train(rule, params, kept), train(rule, other, kept)
    assert same_bits(materialize(first.update.delta), materialize(second.update.delta))
    assert same_bits(first.client_state["local"], second.client_state["local"])


class OneLayerEach:
    """A `Runtime` whose gradient of each tensor depends on that tensor alone: the shared ones learn nothing of the local ones."""

    name = "separable"
    trainable = ("body", "head")

    def take_steps(self, params, batches, lr, correction, seed):  # type: ignore[no-untyped-def]
        weights = {name: params[name] for name in self.trainable}
        for batch in batches:
            for name in set(self.trainable) - correction.fixed:
                target = np.float32(batch.y.mean())
                weights[name] = np.asarray(weights[name] - lr * (weights[name] - target), np.float32)
        return weights, [0.0]

    def logits(self, params, x):  # type: ignore[no-untyped-def]
        raise NotImplementedError


@given(
    heads=st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=6),
    rule=st.sampled_from([LocalTensors(("head",)), HeadThenBody(("head",), 2)]),
    seed=st.integers(0, 100),
)
def test_the_aggregate_depends_on_no_local_value_but_through_the_shared_gradient(
    heads: list[float], rule: PersonalRule, seed: int
) -> None:
    """Where the gradient of the shared tensors is independent of the local ones, so is the next global model, bit for bit."""
    params: Params = {"body": np.ones(3, np.float32), "head": np.zeros(2, np.float32)}

    def next_model(values: list[float]) -> Params:
        strategy = presets.get("fedper", local=["head"])
        fold = strategy.start(len(values))
        for position, value in enumerate(values):
            data = Examples(np.zeros((4, 1), np.float32), np.arange(position, position + 4, dtype=np.int32))
            task = TrainTask(seed=seed, batch_size=4, lr=0.1, steps=1, rule=rule)
            kept = {"local": {"head": np.full(2, value, np.float32)}}
            fold.add(position, Trainer(OneLayerEach()).train(params, task, data, kept).update)
        return materialize(strategy.apply(params, State(), fold.finish(), len(values))[0])

    assert same_bits(next_model(heads), next_model([0.0] * len(heads)))


def test_the_update_of_a_client_with_its_own_model_is_that_of_fedavg() -> None:
    params = first_params(SPEC)
    own = {"personal": noise_like(params, seed=4)}
    plain = train(PlainSGD(), params, {}, steps=2)
    for kept in ({}, own):
        ditto = train(PersonalModel(0.5), params, kept, steps=2)
        assert same_bits(materialize(ditto.update.delta), materialize(plain.update.delta))
        assert ditto.update.train_loss == plain.update.train_loss and ditto.update.extras == {}


def test_without_a_pull_the_own_model_is_what_the_client_would_train_alone() -> None:
    params, kept = first_params(SPEC), dict[str, Params]()
    for _ in range(3):
        kept = train(PersonalModel(0.0), params, kept).client_state
    alone = train(PlainSGD(), params, {}, steps=9).update.delta
    for name, value in kept["personal"].items():
        np.testing.assert_allclose(value, params[name] + alone[name], rtol=0, atol=1e-6)


# -- against independent twins, in plain PyTorch with autograd --

CLIENTS, ROUNDS, STEPS, LR, MU = 3, 4, 3, 0.3, 0.7
TOLERANCE = 1e-5
"""Both take full batches in float32, and sum in another order."""


def federate(name: str, **options: object) -> tuple[Params, list[Params]]:
    """The global model after some rounds, and the clients' own ones, by our strategies."""
    strategy, params = presets.get(name, **options), first_params(SPEC)
    rule = strategy.client_rule
    assert isinstance(rule, PersonalRule)
    states: list[dict[str, Params]] = [{} for _ in range(CLIENTS)]
    for _ in range(ROUNDS):
        fold = strategy.start(CLIENTS)
        for client in range(CLIENTS):
            result = train(rule, params, states[client], seed=client, steps=STEPS)
            states[client] = result.client_state
            fold.add(client, strategy.transform(result.update))
        params = materialize(strategy.apply(params, State(), fold.finish(), CLIENTS)[0])
    return params, [materialize(rule.personal(params, state)) for state in states]


def descend(
    start: Params, client: int, steps: int, names: Sequence[str], towards: Params | None = None
) -> Params:
    """SGD on the named tensors of a client's loss, with MU/2 · ‖v − towards‖² added to it."""
    module = SPEC.build(seed=99)
    load(module, start)
    moving = {name: weight for name, weight in module.named_parameters() if name in names}
    optimizer = torch.optim.SGD(moving.values(), lr=LR)
    data = examples((6,), 3, ROWS, seed=client)
    for _ in range(steps):
        loss = F.cross_entropy(module(torch.from_numpy(data.x)), torch.from_numpy(data.y).long())
        for name, weight in moving.items() if towards is not None else ():
            loss = loss + MU / 2 * (weight - torch.from_numpy(towards[name])).square().sum()  # type: ignore[index]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return read(module)


def mean(models: Sequence[Params]) -> Params:
    return {name: np.mean([each[name] for each in models], axis=0) for name in models[0]}


def assert_close(found: Params, expected: Params) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=TOLERANCE, err_msg=name)


def test_ditto_is_that_of_an_independent_twin() -> None:
    w = first_params(SPEC)
    own = [w] * CLIENTS
    for _ in range(ROUNDS):
        own = [descend(v, client, STEPS, [*BODY, *HEAD], towards=w) for client, v in enumerate(own)]
        w = mean([descend(w, client, STEPS, [*BODY, *HEAD]) for client in range(CLIENTS)])
    params, personal = federate("ditto", mu=MU)
    assert_close(params, w)
    for found, expected in zip(personal, own, strict=True):
        assert_close(found, expected)


def test_fedrep_is_that_of_an_independent_twin() -> None:
    w = first_params(SPEC)
    heads = [{name: w[name] for name in HEAD}] * CLIENTS
    for _ in range(ROUNDS):
        trained = [descend(w | heads[client], client, 2, HEAD) for client in range(CLIENTS)]
        heads = [{name: each[name] for name in HEAD} for each in trained]
        bodies = mean([descend(each, client, STEPS, BODY) for client, each in enumerate(trained)])
        w = w | {name: bodies[name] for name in BODY}
    params, personal = federate("fedrep", head_epochs=2)  # an epoch is one full batch
    assert_close(params, w)
    for found, head in zip(personal, heads, strict=True):
        assert_close(found, w | head)


def test_fedper_is_that_of_an_independent_twin() -> None:
    w = first_params(SPEC)
    heads = [{name: w[name] for name in HEAD}] * CLIENTS
    for _ in range(ROUNDS):
        trained = [descend(w | heads[client], client, STEPS, [*BODY, *HEAD]) for client in range(CLIENTS)]
        heads = [{name: each[name] for name in HEAD} for each in trained]
        bodies = mean(trained)
        w = w | {name: bodies[name] for name in BODY}
    params, personal = federate("fedper")
    assert_close(params, w)
    for found, head in zip(personal, heads, strict=True):
        assert_close(found, w | head)
