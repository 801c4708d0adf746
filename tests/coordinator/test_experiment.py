"""The experiment file: every key has a default, every mistake is named with what was expected, all at once."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.datacenter import compression_request
from coordinator.errors import UserError
from coordinator.experiments import experiment
from coordinator.experiments.schema import Experiment

DEFAULTS = """\
name = "digits"
seed = 7

[data]
dataset = "digits"
label = "label"
partition = "dirichlet(0.3)"
seed = 7
public_samples = 0
public = false

[model]
name = "cnn"
channels = [8, 16]
hidden = 0

[federation]
clients = 20
clients_per_round = 10
rounds = 30
early_stop = 0
keep = "last"
metric = "loss"
mode = "sync"
over_select = 1.0
deadline_seconds = 600.0
min_updates = 1
weight_cap = 10.0
outlier_factor = 100.0
relays = 0

[federation.runtimes]
litert = 0.5
torch = 0.5

[local]
epochs = 5
batch_size = 16
lr = 0.05
momentum = 0.0
clip_grad_norm = 0.0
optimizer = "sgd"

[strategy]
name = "fedavg"
server_lr = 1.0
weighting = "examples"
clip_norm = 0.0

[server_data]

[uplink]

[downlink]

[evaluation]
every = 1

[simulation]
workers = 0
engine = "pool"
seconds_per_step = 0.05
speed_spread = 0.0
dropout = 0.0
local_baseline = "auto"

[simulation.faults]

[devices]
groups = []
classes = []
memory_bytes = 0
patience_seconds = 60.0
evaluate_every = 0
evaluate_seconds = 120.0

[devices.labels]
"""


def load(*sets: str, path: Path | None = None) -> Experiment:
    return experiment.load(path, sets)


def refused(*sets: str, path: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        experiment.load(path, sets)
    return str(caught.value)


def file(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text, "utf-8")
    return path


# Defaults


def test_fedasync_sets_the_mode_and_steps_at_every_update() -> None:
    federation = load("strategy.name=fedasync").federation
    assert (federation.mode, federation.buffer, federation.staleness) == ("async", 1, "polynomial(0.5)")
    assert load("strategy.name=fedasync", "federation.buffer=3").federation.buffer == 3
    devices = experiment.resolve({"strategy": {"name": "fedasync"}}, "my.toml", "devices").federation
    assert (devices.mode, devices.buffer) == ("async", 1)


def test_a_strategy_sets_the_local_work_that_it_needs() -> None:
    sgd = load("strategy.name=fedsgd", "model.name=mlp", "federation.runtimes={torch=1}")
    assert (sgd.local.steps, sgd.local.epochs, sgd.simulation.engine) == (1, None, "pool")
    assert load("strategy.name=qfedavg", "local.lr=0.2").strategy.options["lipschitz"] == 5.0
    assert load("strategy.name=fednova", "local.momentum=0.9").strategy.options["local_momentum"] == 0.9
    assert load("strategy.name=qfedavg", "strategy.lipschitz=2").strategy.options["lipschitz"] == 2.0


def test_every_key_has_a_default(tmp_path: Path) -> None:
    assert load() == load(path=file(tmp_path, DEFAULTS)) == load(path=file(tmp_path, ""))


def test_paths_in_a_file_follow_its_folder_and_those_of_set_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = (
        '[data]\ndataset = "csv"\npath = "rows.csv"\n[model]\nname = "net.keras"\ninit = "../a.safetensors"\n'
    )
    path = file(tmp_path / "there", text)
    for named in (path, Path("../there/my.toml")):
        loaded = load(path=named)
        assert Path(loaded.data.path or "").resolve() == tmp_path / "there" / "rows.csv"
        assert Path(loaded.model.name or "").resolve() == tmp_path / "there" / "net.keras"
        assert Path(loaded.model.init or "").resolve() == tmp_path / "a.safetensors"
    assert load("data.path=rows.csv", path=path).data.path == str(tmp_path / "here" / "rows.csv")
    absolute = file(tmp_path / "there", '[data]\ndataset = "csv"\npath = "/data/rows.csv"\n')
    assert load(path=absolute).data.path == "/data/rows.csv"


def test_the_folders_of_teachers_follow_the_folder_of_the_pipeline(tmp_path: Path) -> None:
    text = "[[step]]\nkind = 'distil'\nteachers = 'one, /two'\n"
    request = compression_request.parse_request(file(tmp_path, text), None, [])
    assert request.pipeline.step[0]["teachers"] == f"{tmp_path / 'one'},/two"


def test_a_version_or_code_in_a_file_is_no_path(tmp_path: Path) -> None:
    path = file(tmp_path, '[model]\nname = "mine:build"\ninit = "digits:3"\n')
    read = experiment.read_document(path, (), "devices")
    assert read["model"] == {"name": "mine:build", "init": "digits:3"}


def test_the_resolved_experiment_is_written_down_with_all_its_keys(tmp_path: Path) -> None:
    assert tomllib.loads(load().to_toml()) == tomllib.loads(DEFAULTS)


@pytest.mark.parametrize(
    ("sets", "model", "partition", "clients"),
    [
        ([], "cnn", "dirichlet(0.3)", 20),
        (["data.dataset=mnist"], "cnn", "dirichlet(0.3)", 20),
        (["data.dataset=shakespeare"], "charlm", "natural", None),
        (["data.dataset=phrasebank"], "textcls", "dirichlet(0.3)", 20),
        (["data.dataset=csv", "data.path=table.csv"], "mlp", "dirichlet(0.3)", 20),
        (["data.dataset=csv", "data.path=t.csv", "data.site=s"], "mlp", "natural", None),
        (["data.dataset=csv", "data.path=t.csv", "data.site=s", "data.partition=iid"], "mlp", "iid", 20),
        (["data.dataset=csv", "data.path=t.csv", 'data.site=""'], "mlp", "dirichlet(0.3)", 20),
        (["data.dataset=synthetic"], "mlp", "dirichlet(0.3)", 20),
        (["data.dataset=mine:load"], "mlp", "dirichlet(0.3)", 20),
        (["data.dataset=csv", "data.path=t.csv", "data.site=s", "data.partition=natural"], "mlp", "natural", None),
    ],
)  # fmt: skip
def test_implied_options_depend_on_the_data(
    sets: list[str], model: str, partition: str, clients: int | None
) -> None:
    resolved = load(*sets)
    assert (resolved.model.name, resolved.data.partition, resolved.federation.clients) == (
        model,
        partition,
        clients,
    )


def test_a_run_is_named_for_its_data_unless_it_has_a_name() -> None:
    assert load("data.dataset=csv", "data.path=/data/wine.csv").name == "wine"
    assert load("data.dataset=synthetic(shape=[4], classes=2, samples=9)").name == "synthetic"
    assert load("data.dataset=mine.rows:load").name == "mine"
    assert load("name=trial").name == "trial"


@pytest.mark.parametrize(("clients", "cohort"), [(3, 3), (10, 10), (11, 10), (100, 10)])
def test_a_cohort_is_ten_clients_where_there_are_as_many(clients: int, cohort: int) -> None:
    assert load(f"federation.clients={clients}").federation.clients_per_round == cohort


def test_steps_take_the_place_of_epochs() -> None:
    resolved = load("local.steps=100")
    assert (resolved.local.steps, resolved.local.epochs) == (100, None)


def test_options_of_model_and_strategy_get_their_defaults_too() -> None:
    resolved = load("model.name=mlp", "strategy.name=fedadam", "strategy.beta1=0.5")
    assert resolved.model.options == {"hidden": [64]}
    assert resolved.strategy.options["beta1"] == 0.5
    assert resolved.strategy.options["server_lr"] == 0.03


def test_the_vocabulary_of_the_data_is_that_of_the_model() -> None:
    assert load("data.dataset=phrasebank", "data.vocab=500").model.options["vocab"] == 500


def test_a_table_of_data_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("data.dataset=csv", "data.path=rows.csv").data.path == str(tmp_path / "rows.csv")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load("data.dataset=csv", "data.path=~/rows.csv").data.path == "/home/somebody/rows.csv"


# Round trip

VARIANTS: list[list[str]] = [
    [],
    ["data.dataset=shakespeare"],
    ["data.dataset=phrasebank", "data.length=8"],
    ["data.dataset=csv", "data.path=t.csv", "data.site=s", 'data.features=["a", "b c"]', "data.partition=natural"],
    ["data.dataset=synthetic(shape=[28, 28], classes=10, samples=5)", "model.name=resnet8"],
    ["model.name=mine.nets:build", 'model.depth=3', 'model.name2="ü \\"quoted\\" \\\\ text"', "model.flag=true"],
    ["strategy.name=scaffold", "local.steps=3", "local.lr=1e-7"],
    ["federation.runtimes={torch=1, litert=2, tensorflow=0.25}", "simulation.faults={nan=2, duplicate=1}"],
    ["model.register=digits@candidate", "model.name=mlp"],
    ["model.init=/some/where.safetensors", "federation.deadline_seconds=0.125", "seed=9223372036854775807"],
]  # fmt: skip


@pytest.mark.parametrize("sets", VARIANTS, ids=lambda sets: " ".join(sets)[:40] or "defaults")
def test_a_resolved_experiment_resolves_to_itself(tmp_path: Path, sets: list[str]) -> None:
    resolved = load(*sets)
    again = load(path=file(tmp_path, resolved.to_toml()))
    assert again == resolved
    assert again.model_dump() == resolved.model_dump()
    assert again.to_toml() == resolved.to_toml()


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
            "seed": st.integers(0, 2**63 - 1),
            "local": st.fixed_dictionaries({}, optional={"lr": st.floats(1e-300, 1e300), "epochs": st.integers(1, 9)}),
            "federation": st.fixed_dictionaries(
                {},
                optional={
                    "clients": st.integers(1, 10**6),
                    "over_select": st.floats(1, 10),
                    "runtimes": st.dictionaries(
                        st.sampled_from(["litert", "torch", "tensorflow"]), st.floats(1e-9, 1e9), min_size=1
                    ),
                },
            ),
            "simulation": st.fixed_dictionaries({}, optional={"dropout": st.floats(0, 0.999)}),
        },
    )
)  # fmt: skip
def test_any_valid_experiment_is_written_down_exactly(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    resolved = experiment.resolve(document, "test")
    path = file(tmp_path_factory.mktemp("experiment"), resolved.to_toml())
    assert experiment.load(path) == resolved


# --set


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("name=plain", "name", "plain"),
        ('name="quoted"', "name", "quoted"),
        ("name=two words", "name", "two words"),
        ("name=a=b", "name", "a=b"),
        ("name='7'", "name", "7"),
        (" seed = 5 ", "seed", 5),
        ("seed=0x10", "seed", 16),
        ("seed=1_000", "seed", 1000),
    ],
)
def test_a_setting_is_a_toml_value_or_else_a_string(setting: str, key: str, value: object) -> None:
    assert getattr(load(setting), key) == value


def test_a_number_is_no_string_and_a_string_no_number() -> None:
    assert refused("name=5") == "experiment: name = 5: input should be a valid string"
    assert refused("local.lr=fast") == "experiment: local.lr = 'fast': input should be a valid number"
    assert refused('local.lr="0.1"') == "experiment: local.lr = '0.1': input should be a valid number"


def test_a_value_of_several_lines_sets_nothing_else() -> None:
    assert load("name=1\nseed=99").model_dump() == {**load().model_dump(), "name": "1\nseed=99"}


def test_settings_go_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = file(tmp_path, "seed = 1\n[local]\nlr = 0.5\nepochs = 2\n")
    resolved = load("local.lr=0.1", "local.lr=0.2", path=path)
    assert (resolved.seed, resolved.local.lr, resolved.local.epochs) == (1, 0.2, 2)


def test_a_table_replaces_and_a_key_within_adds(tmp_path: Path) -> None:
    path = file(tmp_path, "[federation.runtimes]\nlitert = 0.5\ntorch = 0.5\n")
    assert load("federation.runtimes={torch=1}", path=path).federation.runtimes == {"torch": 1.0}
    assert load("federation.runtimes.tensorflow=1", path=path).federation.runtimes == {
        "litert": 0.5,
        "torch": 0.5,
        "tensorflow": 1.0,
    }
    replaced = load("local={lr=0.5}", path=file(tmp_path, "[local]\nlr = 0.1\nepochs = 9\n"))
    assert (replaced.local.lr, replaced.local.epochs) == (0.5, 5)


def test_a_nested_key_makes_the_tables_on_its_way() -> None:
    assert load("simulation.faults.nan=2").simulation.faults == {"nan": 2}


@pytest.mark.parametrize("setting", ["local.lr", "", "=3", " = 3", ".lr=3", "local.=3", "local..lr=3"])
def test_a_setting_without_key_or_value_is_shown_how(setting: str) -> None:
    assert refused(setting) == (f"--set {setting!r} is not of the form key=value, such as --set local.lr=0.1")


def test_a_key_below_a_value_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, "[local]\nlr = 0.1\n")
    assert refused("local.lr.x=1", path=path) == "--set 'local.lr.x=1': lr is a value, not a table"


# Mistakes


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("locl.lr=1", "locl is not a known key, did you mean 'local'?"),
        ("local.learning_rate=1", "local.learning_rate is not a known key"),
        ("local.epoch=1", "local.epoch is not a known key, did you mean 'epochs'?; known here: epochs, steps, batch_size, lr, momentum, clip_grad_norm, optimizer"),
        ("federation.round=1", "federation.round is not a known key, did you mean 'rounds'?"),
        ("simulation.worker=1", "simulation.worker is not a known key, did you mean 'workers'?"),
        ("data.data_set=x", "data.data_set is not a known key, did you mean 'dataset'?"),
        ("federation.runtimes={torh=1}", "federation.runtimes.torh is not allowed, did you mean 'torch'?"),
        ("simulation.faults={nann=1}", "simulation.faults.nann is not allowed, did you mean 'nan'?"),
        ("model.chanels=[1, 2]", "model.chanels is not an option of cnn, did you mean 'channels'?; its options: channels, hidden"),
        ("strategy.servr_lr=1", "strategy.servr_lr: fedavg has no option 'servr_lr', did you mean 'server_lr'?"),
        ("strategy.name=fedadm", "strategy.name: strategy 'fedadm' is unknown, did you mean 'fedadam'?"),
        ("model.name=cn", "model.name = 'cn' is unknown, did you mean 'cnn'?"),
        ("data.dataset=digit", "data.dataset: data set 'digit' is unknown, did you mean 'digits'?"),
        ("data.partition=dirichle(1)", "data.partition: partition 'dirichle"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_reported_with_the_nearest_known(setting: str, message: str) -> None:
    assert message in refused(setting)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("seed=-1", "seed = -1: input should be greater than or equal to 0"),
        ("seed=1.5", "seed = 1.5: input should be a valid integer"),
        ("seed=true", "seed = True: input should be a valid integer"),
        ("federation.rounds=0", "federation.rounds = 0: input should be greater than or equal to 1"),
        ("federation.over_select=0.5", "federation.over_select = 0.5: input should be greater than or equal to 1"),
        ("federation.deadline_seconds=0", "federation.deadline_seconds = 0: input should be greater than 0"),
        ("federation.deadline_seconds=inf", "federation.deadline_seconds = inf: input should be a finite number"),
        ("local.lr=0", "local.lr = 0: input should be greater than 0"),
        ("local.momentum=1", "local.momentum = 1: input should be less than 1"),
        ("local.clip_grad_norm=-1", "local.clip_grad_norm = -1: input should be greater than or equal to 0"),
        ("local.lr=inf", "local.lr = inf: input should be a finite number"),
        ("local.lr=nan", "local.lr = nan: input should be"),
        ("local.batch_size=0", "local.batch_size = 0: input should be greater than or equal to 1"),
        ("federation.mode=fast", "federation.mode = 'fast': input should be 'sync'"),
        ("federation.runtimes={}", "federation.runtimes = {}: dictionary should have at least 1 item"),
        ("federation.runtimes={torch=0}", "federation.runtimes.torch = 0: input should be greater than 0"),
        ("federation.runtimes={torch=inf}", "federation.runtimes.torch = inf: input should be a finite number"),
        ("simulation.dropout=1", "simulation.dropout = 1: input should be less than 1"),
        ("simulation.faults={nan=0}", "simulation.faults.nan = 0: input should be greater than or equal to 1"),
        ("model.channels=[8]", "model.channels = [8]: list should have at least 2 items"),
        ("model.hidden=-1", "model.hidden = -1: input should be greater than or equal to 0"),
        ("strategy.server_lr=0", "strategy.server_lr: server_lr = 0 is not allowed for fedavg: expected > 0"),
        ("strategy.weighting=all", "strategy.weighting: weighting = 'all' is not allowed for fedavg: expected one of examples, uniform"),
        ("model.register=Digits", "model.register: 'Digits' is no name for a model"),
        ("model.register=digits@Best one", "model.register: 'Best one' is no alias"),
        ("model.register=digits:3", "model.register: 'digits:3' is no name for a model"),
        ("data.partition=shards(0)", "data.partition: "),
        ("data.dataset=digits(3)", "data.dataset: data set 'digits' takes no options"),
        ("local=5", "local = 5: expected a table, [local] with keys of its own"),
        ("model=cnn", "model = 'cnn': expected a table, [model] with keys of its own"),
        ("simulation.faults=many", "simulation.faults = 'many': expected a table"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_reported_with_what_was_expected(setting: str, reason: str) -> None:
    message = refused(setting)
    assert message.startswith(f"experiment: {reason}")
    assert "problems" not in message


CONTRADICTIONS: list[tuple[Sequence[str], Sequence[str]]] = [
    (["local.epochs=2", "local.steps=3"], ["local.epochs = 2", "local.steps = 3", "keep one"]),
    (["federation.clients=5", "federation.clients_per_round=8"], ["federation.clients_per_round = 8", "federation.clients = 5", "expected 1 to 5"]),
    (["federation.clients_per_round=3", "federation.min_updates=4"], ["federation.min_updates = 4", "federation.clients_per_round = 3"]),
    (["federation.metric=auc"], ["federation.metric = 'auc'", "federation.early_stop", "set one of them"]),
    (["strategy.name=krum", "strategy.malicious=5"], ["needs 11 or more updates", "federation.clients_per_round = 10", "strategy.malicious = 4 at most"]),
    (["federation.relays=11"], ["federation.relays = 11", "federation.clients_per_round = 10", "would have no client"]),
    (["federation.relays=2", "federation.mode=async"], ["federation.relays = 2", "waits for the clients of a round", "leave one of them out"]),
    (["federation.relays=2", "strategy.name=mine:Own"], ["federation.relays = 2", "strategy.name = 'mine:Own'", "gets every update"]),
    (["federation.malicious_relays=1"], ["federation.malicious_relays = 1", "give federation.relays too"]),
    (["federation.relays=2", "federation.malicious_relays=1"], ["federation.malicious_relays = 1", "strategy.name = 'fedavg'", "leave it out"]),
    (["federation.relays=4", "strategy.name=median"], ["federation.relays = 4 leaves 2 of federation.clients_per_round = 10", "strategy.malicious = 1 needs 3 or more"]),
    (["federation.relays=2", "strategy.name=median"], ["federation.malicious_relays = 1 needs 3 or more relays", "federation.relays = 2", "it bears 0 at most"]),
    (["strategy.name=median", "strategy.malicious=1.5"], ["strategy.malicious", "a whole number >= 0"]),
    (["strategy.name=bulyan", "federation.mode=async"], ["federation.mode = 'async'", "strategy.name = 'bulyan'"]),
    (["strategy.name=scaffold", "local.momentum=0.9", "local.clip_grad_norm=2"], ["local.momentum = 0.9 does", "local.clip_grad_norm = 2 does", "plain SGD"]),
    (["strategy.name=fednova", "local.momentum=0.9", "strategy.local_momentum=0.5"], ["strategy.local_momentum = 0.5 is not local.momentum = 0.9"]),
    (["strategy.name=fedsgd", "local.epochs=2", "local.momentum=0.5"], ["local.epochs = 2 does", "local.steps = 1", "local.momentum = 0.5"]),
    (["strategy.name=qfedavg", "model.name=mlp", "federation.runtimes={torch=1}", "simulation.engine=stacked"], ["simulation.engine = ", "strategy.name = 'qfedavg'", "the loss of the model"]),
    (["federation.weight_cap=0.5"], ["federation.weight_cap = 0.5", "1 or more, or 0: no cap"]),
    (["federation.outlier_factor=0.5"], ["federation.outlier_factor = 0.5", "1 or more, or 0: no bound"]),
    (["federation.clients=4", "simulation.faults={nan=2, duplicate=2}"], ["simulation.faults names 4", "federation.clients = 4", "leave at least one honest"]),
    (["model.name=resnet8", "federation.runtimes={tensorflow=1}"], ["federation.runtimes asks for tensorflow", "model.name = 'resnet8'", "runs in: litert, torch"]),
    (["data.dataset=csv"], ["data.dataset", "needs data.path"]),
    (["data.path=x.csv"], ["data.path = ", "is for csv", "data.dataset = 'digits'"]),
    (["data.site=s"], ["data.site = 's'", "is for csv", "data.dataset = 'digits'"]),
    (["data.split=s"], ["data.split = 's'", "is for csv", "data.dataset = 'digits'"]),
    (['data.features=["a"]'], ["data.features = ['a']", "is for csv", "data.dataset = 'digits'"]),
    (["data.length=8"], ["data.length = 8", "is for shakespeare and phrasebank", "data.dataset = 'digits'"]),
    (["data.dataset=shakespeare", "data.vocab=100"], ["data.vocab = 100", "is for phrasebank", "data.dataset = 'shakespeare'"]),
    (["data.dataset=phrasebank", "data.vocab=100", "model.vocab=50"], ["model.vocab = 50", "data.vocab = 100"]),
]  # fmt: skip


@pytest.mark.parametrize(("sets", "words"), CONTRADICTIONS, ids=lambda part: str(part)[:48])
def test_a_contradiction_names_both_sides(sets: Sequence[str], words: Sequence[str]) -> None:
    message = refused(*sets)
    assert [word for word in words if word not in message] == []


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = file(tmp_path, '[local]\nlr = "0.1"\nepoch = 3\n[federation]\nrounds = 0\n[foo]\n')
    lines = refused(path=path).splitlines()
    assert lines[0] == f"{path}: 4 problems"
    assert {line.split()[1] for line in lines[1:]} == {"local.lr", "local.epoch", "federation.rounds", "foo"}


def test_contradictions_are_reported_beside_keys_that_are_wrong() -> None:
    message = refused(
        "local.lr=fast", "local.epochs=2", "local.steps=3", "model.name=cn", "federation.min_updates=11"
    )
    assert message.startswith("experiment: 4 problems\n  - local.lr = 'fast'")
    for words in (
        "local.epochs = 2 and local.steps = 3",
        "did you mean 'cnn'?",
        "federation.min_updates = 11",
    ):
        assert words in message


@pytest.mark.parametrize(
    "sets",
    [
        ["federation.client=50", "federation.clients_per_round=30"],
        ["federation.clients=many", "federation.clients_per_round=30"],
        ["data.datset=csv", "data.path=t.csv", "data.site=s", "model.norm=group"],
        ["data.dataset=5", "model.width=3"],
        ["data.partiton=natural", "federation.clients_per_round=30"],
        ["model.name=5", "model.width=3", "federation.runtimes={tensorflow=1}"],
        ["strategy.name=5", "strategy.beta1=0.5"],
    ],
)
def test_no_problem_is_reported_of_defaults_that_replace_a_wrong_key(sets: list[str]) -> None:
    assert "problems" not in refused(*sets)


def test_all_contradictions_are_reported_at_once() -> None:
    message = refused("local.epochs=1", "local.steps=1", "strategy.name=x", "model.name=y", "data.dataset=z", "data.partition=w")  # fmt: skip
    assert message.startswith("experiment: 5 problems\n  - ")
    for key in ("local.steps", "strategy.name", "model.name", "data.dataset", "data.partition"):
        assert key in message


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('name = "x"\n[local]\nlr = = 3\n', "line 3, column 6"),
        ("name = x\n", "line 1"),
        ("[local]\nlr = 1\nlr = 2\n", "line 3"),
    ],
)
def test_invalid_toml_is_reported_with_file_and_line(tmp_path: Path, text: str, where: str) -> None:
    path = file(tmp_path, text)
    message = refused(path=path)
    assert message.startswith(f"{path}: not valid TOML: ")
    assert where in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refused(path=tmp_path / "none.toml") == f"{tmp_path / 'none.toml'}: no such experiment file"
    assert refused(path=tmp_path).startswith(f"{tmp_path}: cannot be read: ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert refused(path=tmp_path / "binary.toml").startswith(f"{tmp_path / 'binary.toml'}: cannot be read: ")


def test_a_model_of_ones_own_may_have_any_options() -> None:
    assert load("model.name=my.nets:build", "model.depth=3").model.options == {"depth": 3}


def test_an_option_that_json_has_no_word_for_is_refused() -> None:
    message = refused("model.name=my.nets:build", "model.scales=[1.0, inf]")
    assert "model.scales = [1.0, inf]: expected finite numbers" in message


toml_values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=6) | st.dates(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)
some_keys = st.sampled_from(
    ["name", "seed", "data", "model", "federation", "local", "strategy", "simulation", "dataset", "partition",
     "clients", "runtimes", "lr", "epochs", "faults", "rounds", "channels", "path", "features", "other"]
)  # fmt: skip
documents = st.dictionaries(
    some_keys, toml_values | st.dictionaries(some_keys, toml_values, max_size=3), max_size=4
)


@given(documents)
@example({"data": {".": 0}})
@example({"name.x": 0})
def test_whatever_a_file_says_it_resolves_or_is_refused(document: dict[str, Any]) -> None:
    try:
        experiment.resolve(document, "any.toml").to_toml()
    except UserError as error:
        assert str(error).startswith("any.toml: ")


@pytest.mark.parametrize(
    ("dataset", "lr"), [("digits", 0.05), ("shakespeare", 0.3), ("phrasebank", 0.2), ("csv", 0.05)]
)
def test_the_learning_rate_depends_on_the_data_set_unless_it_is_given(dataset: str, lr: float) -> None:
    requested = [f"data.dataset={dataset}", *(["data.path=t.csv"] if dataset == "csv" else [])]
    assert load(*requested).local.lr == lr
    assert load(*requested, "local.lr=0.01").local.lr == 0.01


# A real fleet


def on_devices(document: dict[str, object]) -> Experiment:
    return experiment.resolve(document, "my.toml", "devices")


def test_devices_may_know_a_data_set_that_the_coordinator_does_not() -> None:
    data = {"dataset": "vibration", "input_shape": [8], "classes": 3}
    assert on_devices({"data": data}).data.dataset == "vibration"


def test_a_data_set_nobody_describes_is_refused_with_what_to_give() -> None:
    with pytest.raises(UserError, match=r"vibration.*give data.schema, or data.input_shape and data.classes"):
        on_devices({"data": {"dataset": "vibration"}})


def test_a_simulation_needs_a_data_set_it_can_load() -> None:
    with pytest.raises(UserError, match="vibration"):
        experiment.resolve({"data": {"dataset": "vibration", "input_shape": [8], "classes": 3}}, "my.toml")


def test_half_a_description_of_the_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.input_shape and data.classes"):
        on_devices({"data": {"input_shape": [8]}})


def test_an_experiment_for_devices_resolves_to_itself() -> None:
    resolved = on_devices({"data": {"dataset": "vibration", "input_shape": [8], "classes": 3}})
    assert on_devices(resolved.model_dump(mode="json", exclude_none=True)) == resolved


QUANTITY = ["data.dataset=csv", "data.path=prices.csv", "data.task=regression"]


def test_quantities_are_predicted_in_torch_and_dealt_out_evenly() -> None:
    resolved = experiment.load(None, QUANTITY)
    assert (resolved.federation.runtimes, resolved.data.partition) == ({"torch": 1.0}, "iid")
    assert experiment.load(None, [*QUANTITY, "data.site=shop"]).data.partition == "natural"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.dataset=digits"], "'digits' has classes"),
    ],
)
def test_models_that_do_not_predict_quantities_are_refused(sets: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        experiment.load(None, [*QUANTITY, *sets])


def test_devices_predict_quantities_of_data_that_the_coordinator_has_too() -> None:
    data = {"dataset": "csv", "path": "prices.csv", "task": "regression"}
    assert "litert" in on_devices({"data": data}).federation.runtimes
    with pytest.raises(UserError, match=r'data\.task = "regression" needs data of the coordinator\'s own'):
        on_devices({"data": {**data, "input_shape": [3], "classes": 2}})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {"dataset": "patients", "path": "p.xls"},
            r"data set 'patients' is unknown.* data\.path, a file named .*\.npz",
        ),
        (
            {"dataset": "digits", "path": "p.csv"},
            "data.path = .* is for csv and npz, but data.dataset = 'digits'",
        ),
        ({"dataset": "patients", "path": "p.npz", "site": "s"}, "data.site = 's' is for csv"),
        ({"dataset": "patients"}, "data set 'patients' is unknown"),
    ],
)
def test_a_name_of_ones_own_is_loaded_from_a_table_or_arrays(data: dict[str, str], expected: str) -> None:
    named = experiment.resolve(
        {"data": {"dataset": "patients", "path": "p.CSV", "site": "ward"}}, "e", "devices"
    ).data
    as_csv = experiment.resolve(
        {"data": {"dataset": "csv", "path": "p.CSV", "site": "ward"}}, "e", "devices"
    ).data
    assert (named.dataset, named.loaded_as, named.to_load) == ("patients", "csv", as_csv.to_load)
    with pytest.raises(UserError, match=expected):
        experiment.resolve({"data": data}, "e", "devices")


@pytest.mark.parametrize("key", ["sample", "every"])
def test_how_held_out_rows_score_needs_rows_that_the_coordinator_holds(key: str) -> None:
    described = {"dataset": "ward", "input_shape": [4], "classes": 2}
    document = {"data": described, "evaluation": {key: 10}, "devices": {"evaluate_every": 1}}
    _, problems = experiment.check(document, "devices")
    assert [problem for problem in problems if f"evaluation.{key} = 10" in problem] == problems != []
    assert not experiment.check({"evaluation": {key: 10}}, "devices")[1]
