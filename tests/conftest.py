"""Settings for all tests: Hypothesis watches no clock, so that a busy machine fails no law."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("no clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clocks")
