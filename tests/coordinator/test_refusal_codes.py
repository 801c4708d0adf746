"""Codes of refusals are a contract: the table in docs/wire.md names those of the device API, all of them and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from coordinator.device_api import tasks
from coordinator.rounds import intake

ROOT = Path(__file__).parents[2]
OF_OPERATORS = {
    (401, "no_token"),
    (401, "bad_token"),
    (404, "unknown_run"),
    (409, "audit_altered"),
    (409, "not_enrolled"),
    (409, "not_pending"),
    (409, "not_prepared"),
    (409, "not_private"),
    (409, "not_resumable"),
    (409, "run_ended"),
    (421, "wrong_host"),
    (503, "no_admin_token"),
}
OF_RELEASES = {
    (409, "unknown_release"),
    (422, "bad_delegation"),
    (422, "bad_path"),
    (422, "bad_signature"),
    (422, "changed_release"),
    (422, "expired"),
    (422, "extra_file"),
    (422, "incomplete_release"),
    (422, "missing_file"),
    (422, "no_root"),
    (422, "other_online_keys"),
    (422, "weak_root"),
    (422, "wrong_bytes"),
    (422, "wrong_manifest"),
    (422, "wrong_version"),
}
OF_ROLLOUTS = {
    (404, "not_a_member"),
    (404, "unknown_release"),
    (404, "unknown_rollout"),
    (409, "did_not_fail"),
    (409, "no_devices"),
    (409, "not_the_newest"),
    (409, "rollout_state"),
    (409, "rollout_under_way"),
    (409, "too_many_devices"),
}
OF_REGISTRY = {
    (404, "unknown_alias"),
    (404, "unknown_file"),
    (404, "unknown_model"),
    (404, "unknown_version"),
    (409, "alias_moved"),
    (409, "busy"),
    (409, "missing_files"),
    (409, "name_taken"),
    (409, "run_not_finished"),
    (409, "wrong_name"),
}
OF_OIDC = {
    (401, "id_token_audience"),
    (401, "id_token_expired"),
    (401, "id_token_issuer"),
    (401, "id_token_malformed"),
    (401, "id_token_nonce"),
    (401, "id_token_signature"),
    (401, "oidc_code"),
    (401, "oidc_issuer"),
    (401, "oidc_refused"),
    (401, "oidc_state"),
    (403, "oidc_no_role"),
    (404, "oidc_off"),
    (503, "oidc_unavailable"),
}
OF_PEOPLE = {
    (401, "bad_sign_in"),
    (401, "session_ended"),
    (403, "bad_password"),
    (403, "csrf"),
    (403, "forbidden"),
    (403, "needs_tls"),
    (403, "setup_link_ended"),
    (403, "no_project"),
    (404, "unknown_access_token"),
    (404, "unknown_project"),
    (404, "unknown_user"),
    (409, "default_project"),
    (409, "has_every_project"),
    (409, "no_account"),
    (409, "project_archived"),
    (409, "project_exists"),
    (409, "project_in_use"),
    (409, "too_many_tokens"),
    (409, "user_exists"),
    (422, "weak_password"),
}
OF_RELAYS = {(409, "no_relay")}
OF_JOBS = {(404, "unknown_job"), (409, "job_state"), (409, "no_jobs"), (409, "too_many_jobs")}
OF_OPERATORS |= OF_JOBS | OF_RELAYS | OF_PEOPLE | OF_OIDC | OF_RELEASES | OF_ROLLOUTS | OF_REGISTRY
BY_STARLETTE = {(405, "method_not_allowed")}
BY_PROTOCOL = {(414, "url_too_long"), (431, "headers_too_large")}
"""Answered before there is a request for the applications."""


def test_the_table_of_the_wire_names_every_code_and_no_other() -> None:
    answered = set(literal()) | by_state() | by_intake() | BY_STARLETTE | BY_PROTOCOL
    assert answered >= OF_OPERATORS
    assert documented() == answered - OF_OPERATORS


def documented() -> set[tuple[int, str]]:
    page = (ROOT / "docs/wire.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d{3}) \| (.+) \|$", page, re.MULTILINE)
    return {
        (int(status), code)
        for status, cell in rows
        for code in re.findall(r"`([a-z_]+)`", re.sub(r"\(with [^)]*\)", "", cell))
    }


def literal() -> Iterator[tuple[int, str]]:
    """Codes that stand in the source beside their status. Inference serving has a protocol of its own."""
    for path in set((ROOT / "coordinator").rglob("*.py")) - set((ROOT / "coordinator/serving").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Refusal", "problem"):
                status, code = call.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    yield status.value, code.value  # type: ignore[misc]
    yield 421, "wrong_host"  # made by the middleware, outside of the applications


def by_state() -> set[tuple[int, str]]:
    return {(409, code) for code, _ in (*tasks._REFUSALS.values(), tasks._CLOSED)}


def by_intake() -> set[tuple[int, str]]:
    """A result that is refused; the second one of a device is refused by its task's state."""
    return {(422, reason) for reason in get_args(intake.Reason)} - {
        (422, reason) for reason in ("oversized", "duplicate", "crashed")
    }
