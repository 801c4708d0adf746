"""`fedloop doctor` checks every part and says how to fix problems."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from coordinator import extras
from coordinator.commands.information import doctor
from coordinator.commands.information.doctor import Finding
from coordinator.sandbox import enter


def found(findings: list[Finding], subject: str) -> Finding:
    (finding,) = [each for each in findings if each.subject == subject]
    return finding


def test_every_part_of_the_installation_is_checked(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path)
    assert [each.subject for each in findings] == [
        "top-level names", "Python", "LiteRT clients", "PyTorch clients", "TensorFlow clients", "DP-SGD",
        "export to LiteRT", "quantization", "ONNX", "reports", "inference serving", "Flower apps", "MLflow",
        "TensorBoard", "data files", "sandbox", "machine",
    ]  # fmt: skip
    assert found(findings, "top-level names").level == "ok"
    assert found(findings, "data files") == Finding("data files", "ok", f"looked for in {tmp_path}")


def test_a_missing_data_folder_is_an_error(tmp_path: Path) -> None:
    finding = found(doctor.examine(tmp_path / "none"), "data files")
    assert finding.level == "error"
    assert str(tmp_path / "none") in finding.message
    assert "FEDLOOP_DATA_DIR" in finding.message


def test_no_data_folder_is_a_note() -> None:
    assert found(doctor.examine(None), "data files").level == "note"


def test_a_missing_part_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.PARTS, "TensorFlow clients", (("no-such-distribution",), "tensorflow"))
    finding = found(doctor.examine(None), "TensorFlow clients")
    assert finding == Finding(
        "TensorFlow clients", "note", "no-such-distribution not installed; pip install 'fedloop[tensorflow]'"
    )


def test_a_machine_without_a_sandbox_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enter, "landlock_version", lambda: 0)
    finding = found(doctor.examine(None), "sandbox")
    assert finding.level == "note"
    assert "no Landlock" in finding.message and "--no-sandbox" in finding.message


def test_a_contested_name_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "zoo-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
    (other / "RECORD").write_text("models/__init__.py,,\nzoo-1.0.dist-info/METADATA,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    finding = found(doctor.examine(None), "top-level names")
    assert finding.level == "error"
    assert "pip uninstall zoo" in finding.message


def test_text_in_brackets_is_shown_verbatim() -> None:
    """`fedloop[edge]` is not markup."""
    text = io.StringIO()
    found = [Finding("LiteRT clients", "note", "pip install 'fedloop[edge]'")]
    Console(file=text, width=200).print(doctor.tabulate(found))
    assert "pip install 'fedloop[edge]'" in text.getvalue()


def test_the_checks_import_no_framework() -> None:
    script = (
        "import sys; from coordinator.commands.information import doctor; doctor.examine(None); "
        "print({'torch', 'tensorflow', 'ai_edge_litert', 'litert_torch', 'jax'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "set()\n"
