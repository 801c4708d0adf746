"""What is read of folders and files before anything is registered, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.db.registry import Input, NewVersion
from coordinator.errors import UserError
from coordinator.operator import version_files
from coordinator.registry.contents import LIMIT_BYTES, content_of
from coordinator.registry.kinds import examine
from edge_client.wire import arrays
from tests.support import model_folders as left


def examined(folder: Path) -> NewVersion:
    return examine(*version_files.gather(folder))


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        examined(folder)
    return raised.value.code


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_pretraining_names_its_data_and_its_parent(tmp_path: Path) -> None:
    left.pretrained(tmp_path, 3, parent="a" * 64)
    found = examined(tmp_path)
    assert (found.kind, found.stage) == ("params", "pretrain")
    assert set(found.inputs) == {Input("data", left.DATA), Input("params", "a" * 64)}
    assert found.metrics == {"pretrain": {"test_accuracy": 0.903, "test_loss": 0.3, "parameters": 15}}


def test_a_run_names_its_data_and_itself(tmp_path: Path) -> None:
    run = "0b9f2c1e-0000-4000-8000-000000000000"
    left.run_left(tmp_path, run=run)
    found = examined(tmp_path)
    assert (found.kind, found.stage) == ("params", "run")
    assert set(found.inputs) == {Input("data", left.DATA), Input("run", run)}
    assert found.metrics["run"] == {"test_accuracy": 0.95, "test_loss": 0.2, "rounds": 2}


def test_the_global_model_of_a_run_whose_clients_keep_tensors_is_refused(tmp_path: Path) -> None:
    left.run_left(tmp_path)
    for strategy, is_refused in (("ditto", False), ("fedper", True), ("fedbn", True)):
        change(tmp_path / "report.json", experiment={"strategy": {"name": strategy}})
        if is_refused:
            assert refused(tmp_path) == "local_tensors"
        else:
            assert examined(tmp_path).stage == "run"


def test_a_compression_names_its_parent_and_leaves_its_steps_behind(tmp_path: Path) -> None:
    left.compressed(tmp_path, "a" * 64)
    found = examined(tmp_path)
    assert (found.kind, found.stage) == ("compressed", "compress")
    assert Input("params", "a" * 64) in found.inputs
    assert not [file.path for file in found.files if "/" in file.path]
    assert found.metrics["1-quantize"]["accuracy"] == 0.88


def test_a_compression_may_have_no_tflite(tmp_path: Path) -> None:
    left.compressed(tmp_path, "a" * 64)
    (tmp_path / "model.tflite").unlink()
    assert refused(tmp_path) == "missing_file"
    change(tmp_path / "lineage.json", tflite_sha256=None)
    assert "model.tflite" not in {file.path for file in examined(tmp_path).files}


def test_packed_params_belong_to_a_compression_and_are_those_of_its_lineage(tmp_path: Path) -> None:
    left.compressed(tmp_path, "a" * 64, packed=left.params(5))
    registered = {file.path: file.sha256 for file in examined(tmp_path).files}
    assert registered["packed.safetensors"] == left.sha256(left.params(5))
    for content, code in ((left.params(6), "hash_mismatch"), (left.tflite(5), "bad_file")):
        (tmp_path / "packed.safetensors").write_bytes(content)
        assert refused(tmp_path) == code
    (tmp_path / "packed.safetensors").unlink()
    assert refused(tmp_path) == "missing_file"
    left.compressed(tmp_path, "a" * 64)  # whose lineage knows of none
    (tmp_path / "packed.safetensors").write_bytes(left.params(5))
    assert refused(tmp_path) == "hash_mismatch"


def test_a_release_names_its_params_and_its_file(tmp_path: Path) -> None:
    small = left.tflite(1)
    left.release(tmp_path, 1, "e" * 64, small)
    found = examined(tmp_path)
    assert (found.kind, found.stage) == ("inference", "release")
    assert {Input("params", "e" * 64), Input("params", left.sha256(small))} < set(found.inputs)
    released = len(left.released(small))
    assert found.metrics["release"] == {"bytes": released, "memory_bytes": 10_000_000, "accuracy": 0.87}
    (tmp_path / "report.json").unlink()
    assert "accuracy" not in examined(tmp_path).metrics["release"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.tflite"])
def test_a_replaced_file_is_refused(tmp_path: Path, name: str) -> None:
    left.compressed(tmp_path / "compressed", "a" * 64)
    other = left.params(77) if name.endswith("safetensors") else left.tflite(77)
    (tmp_path / "compressed" / name).write_bytes(other)
    assert refused(tmp_path / "compressed") == "hash_mismatch"


def test_a_replaced_model_of_a_pretraining_run_or_release_is_refused(tmp_path: Path) -> None:
    left.pretrained(tmp_path / "pretrained")
    left.run_left(tmp_path / "run")
    left.release(tmp_path / "release", 1, "e" * 64, left.tflite(1))
    for folder in ("pretrained", "run"):
        (tmp_path / folder / "model.safetensors").write_bytes(left.params(9))
    (tmp_path / "release" / "model.tflite").write_bytes(left.tflite(9))
    assert {refused(tmp_path / each) for each in ("pretrained", "run", "release")} == {"hash_mismatch"}


def test_documents_that_disagree_are_refused(tmp_path: Path) -> None:
    left.pretrained(tmp_path)
    change(tmp_path / "report.json", final={"model_sha256": "0" * 64})
    assert refused(tmp_path) == "hash_mismatch"
    left.pretrained(tmp_path)
    change(tmp_path / "model.json", sha256="0" * 64)
    assert refused(tmp_path) == "hash_mismatch"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1, "a": 2}', "\x00", "[" * 100_000, "9" * 5000],
)
def test_documents_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    left.pretrained(tmp_path)
    (tmp_path / "lineage.json").write_text(text)
    assert refused(tmp_path) == "bad_document"


@pytest.mark.parametrize(
    "values",
    [
        {"data_fingerprint": "../../etc"},
        {"data_fingerprint": 7},
        {"parent": {"sha256": ["x"]}},
        {"seed": float("nan")},
        {"code_version": "a\0b"},
        {"code_version": "\ud800"},
        {"seed": {"deep": {"deeper": [float("inf")]}}},
    ],
)
def test_values_that_cannot_be_kept_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    left.pretrained(tmp_path)
    change(tmp_path / "lineage.json", **values)
    assert refused(tmp_path) in ("bad_digest", "bad_document")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**63 - 1).to_bytes(8, "little") + b"{}",
        (100 * 2**20).to_bytes(8, "little") + b"{}",
        pickle.dumps({"weights": [1, 2, 3]}),
        left.params(0)[:-4],
        left.params(0) + b"more",
        (8).to_bytes(8, "little") + b'{"a":1} ',
    ],
    ids=["empty", "ones", "endless", "huge", "pickle", "cut", "longer", "no tensors"],
)
def test_files_that_are_no_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        examine(*version_files.gather_foreign(path))
    assert raised.value.code == "bad_file"


def test_a_kind_that_does_not_fit_the_files_is_refused(tmp_path: Path) -> None:
    left.pretrained(tmp_path)
    _, contents = version_files.gather(tmp_path)
    for kind in ("inference", "tflite"):
        with pytest.raises(UserError) as raised:
            examine(kind, contents)  # type: ignore[arg-type]
        assert raised.value.code == "missing_file"


def test_a_tflite_without_its_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(left.params(0))
    with pytest.raises(UserError, match="TFL3"):
        examine(*version_files.gather_foreign(tmp_path / "m.tflite"))


def hugging_face(folder: Path, *, sharded: bool = True) -> None:
    """A folder as `save_pretrained` leaves it."""
    tensors = {"embed.weight": np.ones((4, 2), np.float16), "head.weight": np.ones((2, 2), np.float32)}
    left.write(folder, "config.json", {"model_type": "bert", "architectures": ["BertModel"]})
    if not sharded:
        left.write(folder, "model.safetensors", arrays.encode(tensors))
        return
    shards = {name: f"model-{place:05}-of-00002.safetensors" for place, name in enumerate(tensors, 1)}
    for name, shard in shards.items():
        left.write(folder, shard, arrays.encode({name: tensors[name]}))
    left.write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": shards})


@pytest.mark.parametrize("sharded", [True, False])
def test_a_hugging_face_folder_is_imported(tmp_path: Path, sharded: bool) -> None:
    hugging_face(tmp_path, sharded=sharded)
    left.write(tmp_path, "training_args.bin", pickle.dumps({}))
    found = examine(*version_files.gather_foreign(tmp_path))
    assert (found.kind, found.stage) == ("weights", "import")
    assert found.about["model"] == {"model_type": "bert", "architectures": ["BertModel"]}
    assert (found.about["parameters"], found.about["dtypes"]) == (12, ["F16", "F32"])
    assert not [file.path for file in found.files if file.path.endswith(".bin")]


def test_an_index_that_is_wrong_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    shards = sorted(tmp_path.glob("model-*"))
    wrong = {"embed.weight": shards[1].name, "head.weight": shards[1].name}
    left.write(tmp_path, "model.safetensors.index.json", {"weight_map": wrong})
    with pytest.raises(UserError, match=r"embed\.weight"):
        examine(*version_files.gather_foreign(tmp_path))
    hugging_face(tmp_path)
    shards[0].unlink()
    with pytest.raises(UserError, match=r"embed\.weight"):
        examine(*version_files.gather_foreign(tmp_path))
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(UserError, match=r"'head\.weight' is in"):
        examine(*version_files.gather_foreign(tmp_path))


def test_an_onnx_file_is_the_one_that_its_document_tells_of(tmp_path: Path) -> None:
    result = {"opset": {"ai.onnx": 20}, "inputs": [], "outputs": []}
    result["sha256"] = left.write(tmp_path, "model.onnx", left.onnx("w.data"))
    result["external"] = {"w.data": left.write(tmp_path, "w.data", b"weights")}
    result["params_sha256"] = left.write(tmp_path, "model.safetensors", left.params(0))
    left.write(tmp_path, "onnx.json", result)
    names = ("model.onnx", "w.data", "model.safetensors", "onnx.json")

    def version() -> Any:
        return examine("onnx", {name: content_of(tmp_path / name) for name in names})

    found, size = version(), len(left.onnx("w.data")) + len(b"weights")
    assert (found.stage, found.metrics["import"]) == ("import", {"bytes": size, "parameters": 15})
    assert found.about["opset"] == {"ai.onnx": 20}
    for name in names[:3]:
        kept = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(left.params(1))
        with pytest.raises(UserError, match=f"{name} has the hash") as caught:
            version()
        assert caught.value.code == "hash_mismatch"
        (tmp_path / name).write_bytes(kept)


RUBBISH = {
    "empty": b"",
    "text": b"nothing of the kind",
    "zeros": bytes(1000),
    "pickle": pickle.dumps({"weights": [1.0, 2.0]}),
    "safetensors": left.params(0),
    "cut": left.onnx()[:-3],
    "without outputs": left.onnx(outputs=0),
    "another message": left.onnx()[2:],
    "endless": b"\x08\x0a" * 600_000,
    "too long": b"\x08\x0a\x3a\xff\xff\xff\xff\x0f",
}


def onnx_version(folder: Path, content: bytes, **external: str) -> NewVersion:
    result = {"sha256": left.write(folder, "model.onnx", content), "external": external}
    left.write(folder, "onnx.json", result)
    names = ("model.onnx", "onnx.json", *external)
    return examine("onnx", {name: content_of(folder / name) for name in names})


@pytest.mark.parametrize("kind", RUBBISH)
@pytest.mark.slow
def test_rubbish_is_not_kept_as_onnx(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserError, match=r"model\.onnx is not an ONNX file") as raised:
        onnx_version(tmp_path, RUBBISH[kind])
    assert raised.value.code == "bad_file"


def test_an_onnx_file_has_its_weights_where_its_document_says(tmp_path: Path) -> None:
    assert onnx_version(tmp_path, left.onnx()).kind == "onnx"
    digest = left.write(tmp_path, "w.data", b"weights")
    for content, external in (
        (left.onnx("../../pki/ca.key"), {}),
        (left.onnx("w.data"), {}),
        (left.onnx(), {"w.data": digest}),
    ):
        with pytest.raises(UserError, match="has weights in") as raised:
            onnx_version(tmp_path, content, **external)
        assert raised.value.code == "bad_file"


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "weights.pkl", "model.onnx", "run.sh", "sub/lineage.json"]
)
def test_a_file_that_the_kind_does_not_name_is_refused(tmp_path: Path, name: str) -> None:
    left.pretrained(tmp_path / "params")
    hugging_face(tmp_path / "weights")
    left.release(tmp_path / "inference", 1, "e" * 64, left.tflite(1))
    gathered = [version_files.gather(tmp_path / "params"), version_files.gather(tmp_path / "inference")]
    left.write(tmp_path, name, pickle.dumps({}))
    for kind, contents in (*gathered, version_files.gather_foreign(tmp_path / "weights")):
        with pytest.raises(UserError, match=re.escape(name)) as raised:
            examine(kind, {**contents, name: content_of(tmp_path / name)})
        assert raised.value.code == "extra_file"


@pytest.mark.parametrize("name", ["curves.png", "rounds.csv", "config.toml", "pipeline.toml"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    left.pretrained(tmp_path)
    left.write(tmp_path, name, pickle.dumps({"a": [1.5]}))
    assert refused(tmp_path) == "bad_file"


def test_links_out_of_a_folder_from_elsewhere_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text('{"model_type": "secret"}')
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        hugging_face(folder, sharded=False)
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        with pytest.raises(UserError, match=r"leads out of .*cp -rL"):
            version_files.gather_foreign(folder)


def test_links_within_a_folder_from_elsewhere_are_files(tmp_path: Path) -> None:
    hugging_face(tmp_path, sharded=False)
    (tmp_path / "blob").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert examine(*version_files.gather_foreign(tmp_path)).about["parameters"] == 12


def test_a_pipe_or_a_huge_file_in_a_folder_from_elsewhere_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path, sharded=False)
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(LIMIT_BYTES + 1)
    with pytest.raises(UserError, match="expected at most"):
        version_files.gather_foreign(tmp_path)
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(UserError, match="it is a pipe"):
        version_files.gather_foreign(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.pkl", "last.ckpt"])
def test_pickles_are_refused_unopened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match="pickles"):
            version_files.gather_foreign(path)


def test_a_foreign_file_is_reported(tmp_path: Path) -> None:
    for missing in (version_files.gather, version_files.gather_foreign):
        with pytest.raises(UserError, match="there is no such"):
            missing(tmp_path / "absent")
    with pytest.raises(UserError, match="fedloop model import"):
        version_files.gather(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(left.params(0))
    with pytest.raises(UserError, match="fedloop model import"):
        examined(tmp_path)


def test_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    content = content_of(tmp_path / "a")
    assert (content.sha256, content.size_bytes) == (left.sha256(b"abc"), 3)
