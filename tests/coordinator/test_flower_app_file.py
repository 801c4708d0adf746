"""The `pyproject.toml` of a Flower app: read as Flower reads it, and every mistake named by file and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args

from coordinator.errors import UserError
from coordinator.flower_apps.app_file import DEFAULT_CLIENTS, FlowerApp, read

COMPONENTS = (
    '[tool.flwr.app.components]\nserverapp = "mine.server_app:app"\nclientapp = "mine.client_app:make.app"\n'
)
CONFIG = """
[tool.flwr.app.config]
lr = 0.1
num-server-rounds = 3
name = "a b"
verbose = false
[tool.flwr.app.config.model]
width = 4
[tool.flwr.app.config.model.deep]
er = 1
"""
NESTED: dict[str, Any] = {
    "lr": 0.1,
    "num-server-rounds": 3,
    "name": "a b",
    "verbose": False,
    "model": {"width": 4, "deep": {"er": 1}},
}


def app_of(folder: Path, text: str, *overrides: str) -> FlowerApp:
    (folder / "pyproject.toml").write_text(text)
    return read(folder, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as refused:
        app_of(folder, text, *overrides)
    return str(refused.value)


def test_components_and_configuration_are_read(tmp_path: Path) -> None:
    app = app_of(tmp_path, f'[project]\nname = "mine"\n{COMPONENTS}{CONFIG}')
    assert (app.name, app.server, app.client) == ("mine", "mine.server_app:app", "mine.client_app:make.app")
    assert app.config == flatten_dict(NESTED)
    assert app.clients == DEFAULT_CLIENTS


def test_the_default_federation_says_how_many_clients_there_are(tmp_path: Path) -> None:
    federations = (
        '[tool.flwr.federations]\ndefault = "b"\n[tool.flwr.federations.a]\noptions.num-supernodes = 3\n'
        "[tool.flwr.federations.b]\noptions.num-supernodes = 40\n"
    )
    assert app_of(tmp_path, COMPONENTS + federations).clients == 40


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr=0.5"],
        ["lr=0.5 num-server-rounds=7", "model.width=8"],
        ["name='single quoted' verbose=true"],
        ['name="double = quoted" lr=1e-3 model.deep.er=-2'],
        ["  lr=1   ", ""],
        ["lr=1", "lr=2"],
    ],
)
def test_overrides_are_merged_as_by_flower(tmp_path: Path, overrides: list[str]) -> None:
    expected = fuse_dicts(flatten_dict(NESTED), parse_config_args(overrides))
    config = app_of(tmp_path, COMPONENTS + CONFIG, *overrides).config
    assert config == expected
    assert list(map(type, config.values())) == list(map(type, expected.values()))


def test_overrides_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("lr = 0.25\n[model]\nwidth = 9\n")
    config = app_of(tmp_path, COMPONENTS + CONFIG, str(tmp_path / "more.toml")).config
    assert config == {**flatten_dict(NESTED), "lr": 0.25, "model.width": 9}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learning=1"], "--run-config learning: [tool.flwr.app.config] of {file} has no such key; its keys are lr, "),
        (["model.with=1"], "has no such key, did you mean 'model.width'?"),
        (["lr 0.1"], "--run-config 'lr 0.1': 'lr' is not of the form key=value"),
        (["lr = 0.1"], "without spaces around ="),
        (["name=abc"], "--run-config name=abc: the value is not TOML; expected true, 5, 0.1 or, with its quotes, name='\"text\"'"),
        (["lr=[1,2]"], "--run-config lr=[1, 2]: expected a bool, a number or a string"),
        (["a.toml", "lr=1"], "either one TOML file or key=value pairs"),
        (["none.toml"], "--run-config none.toml: no such file"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    reported = refusal(tmp_path, COMPONENTS + CONFIG, *overrides)
    assert message.format(file=tmp_path / "pyproject.toml") in reported


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[project]\nname = 'x'", "has no table [tool.flwr.app]; this is no Flower app"),
        ("[tool", "not valid TOML: "),
        ("[tool.flwr.app.components]\nagentapp = 'a:b'", "components.agentapp: Fedloop runs apps of a serverapp and a clientapp"),
        ("[tool.flwr.app.components]\nserverapp = 'a:b'", "tool.flwr.app.components.clientapp is missing"),
        (COMPONENTS.replace("mine.server_app:app", "mine.server_app"), "serverapp = 'mine.server_app': expected \"module:attribute\""),
        (COMPONENTS + "[tool.flwr.app]\nconfig = 5", "tool.flwr.app.config = 5: expected a table"),
        (COMPONENTS + "[tool.flwr.app.config.a]\nb = [1]", "tool.flwr.app.config.a.b = [1]: expected a bool"),
        (
            COMPONENTS + "[tool.flwr.federations]\ndefault = 'l'\n[tool.flwr.federations.l]\noptions.num-supernodes = 'ten'",
            "tool.flwr.federations.l.options.num-supernodes = 'ten': expected a whole number from 1",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    reported = refusal(tmp_path, text)
    assert reported.startswith(f"{tmp_path / 'pyproject.toml'}: ")
    assert message in reported


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    reported = refusal(tmp_path, "[tool.flwr.app.components]\nserverapp = 5\n")
    assert "2 problems" in reported and "serverapp = 5" in reported and "clientapp is missing" in reported


def test_a_folder_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no pyproject\.toml in this folder"):
        read(tmp_path / "none")
