"""The model repository is what Triton's own schema wants, and holds what Triton loads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import text_format

from flows.cli.command import main
from tasks.serving.triton import write_repository
from training.records.results import ExportedModel


def schema() -> Any:
    """Triton's model_config.proto as tritonclient carries it; its package itself wants grpcio."""
    files = importlib.metadata.files("tritonclient") or []
    path = next(file for file in files if file.name == "model_config_pb2.py").locate()
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def proto() -> Any:
    return schema()


def repository(exported_run: Path, target: Path, version: int = 3) -> dict[str, Path]:
    folders = write_repository(exported_run / "export", target, name="tiny", version=version)
    return {folder.name: folder for folder in folders}


def parsed(folder: Path, proto: Any) -> Any:
    """Raises ParseError for a field or an enum's name that the schema does not have."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), proto.ModelConfig())


def test_the_configs_are_messages_of_tritons_schema(exported_run: Path, tmp_path: Path, proto: Any) -> None:
    folders = repository(exported_run, tmp_path)
    assert set(folders) == {"tiny", "tiny-decode"}
    forward, decode = (parsed(folders[name], proto) for name in ("tiny", "tiny-decode"))
    assert (forward.name, forward.backend, forward.max_batch_size) == ("tiny", "onnxruntime", 8)
    assert forward.dynamic_batching.max_queue_delay_microseconds == 500
    (group,) = forward.instance_group
    assert (proto.ModelInstanceGroup.Kind.Name(group.kind), group.count) == ("KIND_AUTO", 1)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in forward.input] == [
        ("input_ids", proto.TYPE_INT64, [-1])
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in forward.output] == [
        ("logits", proto.TYPE_FP32, [-1, 258])
    ]
    cache = {tensor.name: list(tensor.dims) for tensor in decode.input if tensor.name.startswith("past")}
    assert cache == {f"past_key_values.{i}.{part}": [2, -1, 8] for i in (0, 1) for part in ("key", "value")}
    assert [sample.batch_size for sample in decode.model_warmup] == [1, 8]


def test_the_warm_up_is_a_request_that_the_graph_takes(exported_run: Path, tmp_path: Path, proto: Any) -> None:
    folder = repository(exported_run, tmp_path)["tiny-decode"]
    sample = parsed(folder, proto).model_warmup[1]
    types = {proto.TYPE_INT64: np.int64, proto.TYPE_FP32: np.float32}
    feed = {
        name: np.zeros((sample.batch_size, *tensor.dims), dtype=types[tensor.data_type])
        for name, tensor in sample.inputs.items()
    }
    session = onnxruntime.InferenceSession(str(folder / "3" / "model.onnx"))
    assert session.run(["logits"], feed)[0].shape == (8, 1, 258)


def test_what_somebody_changed_stays_while_the_tensors_are_the_same(
    exported_run: Path, tmp_path: Path, proto: Any
) -> None:
    folder = repository(exported_run, tmp_path)["tiny"]
    path = folder / "config.pbtxt"
    path.write_text(path.read_text().replace("max_batch_size: 8", "max_batch_size: 32"))
    repository(exported_run, tmp_path, version=4)
    assert parsed(folder, proto).max_batch_size == 32
    path.write_text(path.read_text().replace("258", "300"))
    repository(exported_run, tmp_path, version=5)
    assert (parsed(folder, proto).max_batch_size, list(parsed(folder, proto).output[0].dims)) == (8, [-1, 258])


def test_without_graphs_the_exports_reason_is_given(exported_run: Path, tmp_path: Path) -> None:
    record = ExportedModel.read(exported_run / "export" / "export.json")
    parity, skipped = record.parity.model_copy(update={"graphs": ()}), {"model.onnx": "it cannot be converted (why)"}
    record.model_copy(update={"parity": parity, "skipped": skipped}).write(tmp_path / "export" / "export.json")
    with pytest.raises(ValueError, match=r"has no ONNX graphs for Triton: it cannot be converted \(why\)"):
        repository(tmp_path, tmp_path / "models")


def test_a_later_version_lies_beside_the_earlier_and_an_engine_is_a_model_of_its_own(
    exported_run: Path, tmp_path: Path, proto: Any
) -> None:
    import shutil

    shutil.copytree(exported_run / "export", tmp_path / "run" / "export")
    for file in ("model.plan", "decode.plan"):
        (tmp_path / "run" / "export" / file).write_bytes(b"engine")
    repository(exported_run, tmp_path / "repository", version=3)
    folders = repository(tmp_path / "run", tmp_path / "repository", version=4)
    assert {path.name for path in folders["tiny"].iterdir()} == {"3", "4", "config.pbtxt"}
    engine = parsed(folders["tiny-tensorrt"], proto)
    assert engine.backend == "tensorrt"
    assert proto.ModelInstanceGroup.Kind.Name(engine.instance_group[0].kind) == "KIND_GPU"
    assert (folders["tiny-tensorrt"] / "4" / "model.plan").read_bytes() == b"engine"
    assert list(engine.instance_group[0].profile) == []
    with_cache = parsed(folders["tiny-decode-tensorrt"], proto)
    assert list(with_cache.instance_group[0].profile) == ["0", "1"], "prompts, and single tokens"


def test_the_command_takes_an_export_folder_too_and_says_what_it_wrote(
    exported_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["triton", str(exported_run / "export"), str(tmp_path / "models")]) == 0
    written = capsys.readouterr().out.split()
    assert written == [str(tmp_path / "models" / name) for name in (exported_run.name, f"{exported_run.name}-decode")]
    assert main(["triton", str(tmp_path), str(tmp_path / "models")]) == 2
    assert "has no export.json" in capsys.readouterr().err
