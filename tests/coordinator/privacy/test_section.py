"""The table `[privacy]`: what it accepts, completes and refuses."""

from __future__ import annotations

import pytest

from coordinator.errors import UserError
from coordinator.experiments import experiment


def refused(*sets: str) -> str:
    with pytest.raises(UserError) as caught:
        experiment.load(None, sets)
    return str(caught.value)


def test_an_experiment_without_privacy_has_no_such_table() -> None:
    assert "privacy" not in experiment.load(None).to_toml()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "privacy.clip_norm=1",
            "privacy.clip_norm = 1.0 is about differential privacy; set privacy.mechanism too",
        ),
        ("privacy.mechanism=secret", "privacy.mechanism = 'secret'"),
        ("privacy.mechanism=example", "privacy.mechanism = 'example' is not available in this version"),
        ("privacy.clipnorm=1", "privacy.clipnorm is not a known key, did you mean 'clip_norm'?"),
    ],
)
def test_what_cannot_be_done_is_refused(setting: str, words: str) -> None:
    assert words in refused(setting)
