"""The daemon's configuration: three layers, all mistakes at once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edge_client import config
from edge_client.commands.cli import app
from edge_client.daemon.host_environment import HostEnvironment, read_desired
from edge_client.errors import UserError
from edge_client.state import State

TEXT = """
name = "pump-7"
runtimes = ["torch", "litert"]
[labels]
site = "berlin"
[limits]
memory_bytes = 1000
seconds = 60
[conditions]
max_load = 0.5
[data.digits]
kind = "csv"
path = "/data/digits.csv"
label = "digit"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "edge.toml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    loaded = config.load(
        written(tmp_path, TEXT),
        {"FEDLOOP_EDGE_LIMITS_SECONDS": "70", "FEDLOOP_EDGE_LIMITS_MEMORY_BYTES": "2000"},
        ["limits.memory_bytes=3000"],
    )
    limits = loaded.config.limits
    assert (limits.memory_bytes, limits.seconds, limits.cpu_seconds) == (3000, 70.0, 3600.0)
    origins = {key: origin for key, (_, origin) in loaded.origins.items()}
    assert origins["limits.memory_bytes"] == "--set limits.memory_bytes"
    assert origins["limits.seconds"] == "FEDLOOP_EDGE_LIMITS_SECONDS"
    assert origins["name"] == str(tmp_path / "edge.toml")
    assert origins["limits.cpu_seconds"] == "default"


def test_a_file_is_read_completely(tmp_path: Path) -> None:
    found = config.load(written(tmp_path, TEXT), {}).config
    assert found.runtimes == ("torch", "litert")
    assert found.labels == {"site": "berlin"}
    assert found.conditions.max_load == 0.5
    assert found.data["digits"].kind == "csv"
    assert found.data["digits"].path == Path("/data/digits.csv")
    assert found.data["digits"].options == {"label": "digit"}


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    text = """
    nmae = "x"
    runtimes = ["tflite"]
    [limits]
    memory_bytes = "much"
    seconds = -1
    [conditions]
    quiet_hours = ["late"]
    [data.digits]
    path = "/data"
    """
    with pytest.raises(UserError) as caught:
        config.load(written(tmp_path, text), {"FEDLOOP_EDGE_LIMIT_SECONDS": "1"}, ["nonsense"])
    message = str(caught.value)
    for words in (
        "'nmae', did you mean 'name'",
        "runtimes[0] is 'tflite'",
        "limits.memory_bytes is 'much', expected a whole number",
        "limits.seconds is -1.0, expected 0 or more",
        "late",
        "data.digits has no kind",
        "did you mean 'FEDLOOP_EDGE_LIMITS_SECONDS'",
        "--set nonsense: expected key=value",
    ):
        assert words in message, (words, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [("name = ", "is not valid TOML"), (None, "cannot be read")],
)
def test_an_unreadable_file_is_reported(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "edge.toml" if text is None else written(tmp_path, text)
    with pytest.raises(UserError, match=message):
        config.load(path, {})


def test_without_a_file_everything_has_a_default(tmp_path: Path) -> None:
    found = config.load(None, {"XDG_CONFIG_HOME": str(tmp_path)}).config
    assert found.name
    assert found.limits.memory_bytes > 0
    assert found.data == {}


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT)
    assert config.load(None, {"FEDLOOP_EDGE_CONFIG": str(path)}).config.name == "pump-7"


def test_a_key_of_another_version_is_named_once_and_no_code_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "edge.toml"
    file.write_text('[conditions]\nmin_battery = 20\nmax_load = "high"\n')
    with pytest.raises(UserError) as raised:
        config.load(file, {})
    assert "unknown key 'conditions.min_battery', did you mean 'conditions.min_battery_percent'?" in str(
        raised.value
    )
    assert "conditions.max_load is 'high'" in str(raised.value)
    assert "__init__" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 2


def test_keys_that_no_version_has_are_reported_in_all_tables(tmp_path: Path) -> None:
    stale = "[limits]\nmemory = 5\n[conditions]\non_mains = true\n[releases]\ntrail_seconds = 4\n"
    with pytest.raises(UserError) as caught:
        config.load(written(tmp_path, stale), {})
    for key in ("limits.memory_bytes", "conditions.on_ac_power", "releases.trial_seconds"):
        assert f"did you mean '{key}'?" in str(caught.value)
    assert "__init__" not in str(caught.value)


def test_config_check_tells_options_that_data_does_not_have(tmp_path: Path) -> None:
    data = '[data.one]\nkind = "csv"\npath = "a.csv"\nlable = "y"\n[data.two]\nkind = "cvs"\npath = "a.csv"\n'
    done = CliRunner().invoke(app, ["--config", str(written(tmp_path, data)), "config", "check"])
    assert isinstance(done.exception, UserError)
    first, second = str(done.exception).splitlines()
    assert first == "data.one: csv data has no option 'lable', did you mean 'label'?"
    assert second.startswith(
        "data.two: kind 'cvs' of data is unknown, did you mean 'csv'?; known here: csv, parquet"
    )
    fine = CliRunner().invoke(app, ["--config", str(written(tmp_path, TEXT)), "config", "check"])
    assert fine.exit_code == 0 and "data.digits.label" in fine.output


@pytest.mark.parametrize("required", [True, False])
def test_what_the_owner_requires_of_updates_reaches_the_daemon(tmp_path: Path, required: bool) -> None:
    text = f"require_noise = {required}\nrequire_secure_aggregation = {not required}\n".lower()
    loaded = config.load(written(tmp_path, text), {"HOME": str(tmp_path)}, [f"state_dir={tmp_path}"]).config
    host = HostEnvironment(ineligible=lambda: (), datasets=dict, runtimes={}, models=())
    with closing(State(tmp_path)) as state:
        desired = read_desired(loaded, state, host)
    assert (desired.requires_noise, desired.masks_updates) == (required, not required)
