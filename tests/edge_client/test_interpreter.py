"""Notices of the runtime do not reach standard error; everything else does."""

from __future__ import annotations

import os

import pytest

from edge_client.train.interpreter import without_notices


def test_notices_are_dropped_and_the_rest_follows(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), without_notices():
        os.write(2, b"INFO: Created a delegate.\nWARNING: this op is slow\n")
        raise ValueError
    os.write(2, b"INFO: after\n")
    assert capfd.readouterr().err == "WARNING: this op is slow\nINFO: after\n"
