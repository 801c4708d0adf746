"""A version of the registry as a folder in Hugging Face's layout, which transformers loads with `from_pretrained`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.datacenter import hugging_face
from coordinator.datacenter.documents import EXPERIMENT, MODEL, PARAMS, REPORT
from coordinator.errors import UserError
from coordinator.operator import version_export
from coordinator.operator.client import OnBytes, OperatorClient
from coordinator.output_folders import require_new
from coordinator.storage.private_folders import private_folder
from edge_client.wire.schema import SCHEMA_NAME

_DESCRIBED_BY = (MODEL, REPORT, EXPERIMENT, SCHEMA_NAME)


def source_files(version: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The params of a version and the documents that describe its model, as the API shows them.

    Raises:
        UserError: it has no params, or its model has no counterpart there; names those that have one.
    """
    found = f"--format hugging-face: {version['version']}"
    if version["kind"] == "weights":
        raise UserError(f"{found} is imported weights, which --format files fetches as they were")
    files = [file for file in version["files"] if file["path"] in (PARAMS, *_DESCRIBED_BY)]
    if not any(file["path"] == PARAMS for file in files):
        raise UserError(
            f"{found} is {version['kind']} of stage {version['stage']} and has no {PARAMS}; versions from pretrain, simulate, "
            "run or compress have it"
        )
    hugging_face.require_counterpart(found, version["about"].get("model", {}).get("name"))
    return files


def export(
    client: OperatorClient, version: Mapping[str, Any], out: Path, tokenizer: Path | None, on_bytes: OnBytes
) -> dict[str, Any]:
    """Writes the model of a version into the new or empty folder `out`; returns its config, files and number of parameters.

    Args:
        tokenizer: folder of the tokenizer's files.

    Raises:
        UserError: the version cannot be written so, or `out` is not empty or not writable.
    """
    require_new(out)
    with private_folder() as scratch:
        source = scratch / "source"
        version_export.export(client, {**version, "files": source_files(version)}, source, on_bytes)
        return hugging_face.export_folder(source, out, tokenizer)
