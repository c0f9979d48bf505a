"""The export of a model that was trained further: how it ends texts is kept, and what is not carried over is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tasks.planning.pretrained import generation
from tests.support.configs import read_plan
from tests.support.strangers_tokenizers import BY_THREES, split_by
from tests.support.tiny_run import END, tiny_run
from training.config.run import RunConfig
from training.export import export_run
from training.records.results import ExportedModel
from training.tokenizer.pretrained import SAMPLES


def continued(folder: Path, model: Path) -> Path:
    """runs/ID whose plan says that it went on from this model."""
    run_dir = tiny_run(folder, onnx_up_to_gib=0)
    plan = read_plan(run_dir)
    asked = plan.config.model_dump(mode="json")
    asked["model"] |= {"architecture": "path", "init": "pretrained", "path": str(model)}
    config = RunConfig.model_validate(asked)
    plan.model_copy(update={"config": config} | generation(config.model, plan.end_id)).write(run_dir / "plan.json")
    return run_dir


def model_folder(folder: Path, *, eos: Any = None, generation_config: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    AutoConfig.for_model("llama", eos_token_id=eos).save_pretrained(folder)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.mark.parametrize(
    ("of_config", "given", "expected"),
    [
        (END, {"eos_token_id": [END, 7], "temperature": 0.6, "do_sample": False}, [END, 7]),
        (END, {"eos_token_id": [7, END], "pad_token_id": 3, "max_new_tokens": 5}, [7, END]),
        (END, {"eos_token_id": 7}, [END, 7]),
        (END, {"eos_token_id": [END], "suppress_tokens": [4]}, [END]),
        ([END, 7, 9], {"temperature": 0.6}, [END, 7, 9]),
        ([7], None, [END, 7]),
        (None, None, END),
    ],
)
def test_what_ends_a_text_and_how_it_is_drawn_is_kept(
    tmp_path: Path, of_config: Any, given: dict[str, Any] | None, expected: Any
) -> None:
    run_dir = continued(tmp_path / "run", model_folder(tmp_path / "model", eos=of_config, generation_config=given))
    exported = export_run(run_dir)
    written = json.loads((run_dir / "export" / "generation_config.json").read_text())
    ends = expected if isinstance(expected, list) else [expected]
    assert written["eos_token_id"] == expected
    assert {**written, "eos_token_id": 0} == {"pad_token_id": END} | written | (given or {}) | {"eos_token_id": 0}
    assert GenerationConfig.from_pretrained(run_dir / "export").eos_token_id == expected
    assert set(exported.end_ids) == {*ends} == {*read_plan(run_dir).end_ids}
    assert exported.end_ids[0] == END


@pytest.mark.parametrize("wrong", ["</s>", [1, "</s>"], -1, {"id": 1}])
def test_end_tokens_that_are_no_ids_are_refused_before_the_run(tmp_path: Path, wrong: Any) -> None:
    model = model_folder(tmp_path / "model", generation_config={"eos_token_id": wrong})
    with pytest.raises(ValueError, match=r"eos_token_id of its generation_config.json is .*: correct it"):
        continued(tmp_path / "run", model)


def test_its_licence_is_carried_and_all_else_is_said(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", generation_config={})
    for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md", "README.md", "preprocessor_config.json", "modeling_own.py"):
        (model / name).write_text("{}" if name.endswith(".json") else f"of {name}")
    for name in ("tokenizer.json", "special_tokens_map.json", "model-00001-of-00002.safetensors", ".gitattributes"):
        (model / name).write_text("{}")
    (model / "adapters").mkdir()
    run_dir = continued(tmp_path / "run", model)
    export_run(run_dir)
    folder = run_dir / "export"
    assert [(folder / name).read_text() for name in ("LICENSE", "NOTICE.txt", "USE_POLICY.md")] == [
        "of LICENSE",
        "of NOTICE.txt",
        "of USE_POLICY.md",
    ]
    exported = ExportedModel.read(folder / "export.json")
    assert {"LICENSE", "NOTICE.txt"} <= exported.files.keys()
    said = exported.skipped["files of model.path"]
    assert said.startswith("README.md, adapters, modeling_own.py, preprocessor_config.json: beside config, weights")
    assert said in exported.left_out


def test_a_config_that_names_code_does_not_name_it_in_the_export(tmp_path: Path) -> None:
    run_dir = continued(tmp_path / "run", model_folder(tmp_path / "model"))
    for file in run_dir.glob("checkpoints/*/config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoModel": "modeling_own.Own"}}))
    export_run(run_dir)
    assert "auto_map" not in json.loads((run_dir / "export" / "config.json").read_text())


@pytest.mark.parametrize(("model_type", "differs"), [("llama", False), ("qwen2", True), ("mistral", False)])
def test_the_export_says_if_autotokenizer_makes_other_tokens(tmp_path: Path, model_type: str, differs: bool) -> None:
    """transformers takes Qwen 2's own pattern for every tokenizer of a qwen2, whatever the files say."""
    from training.exports.tokenizer_files import why_others_differ

    run_dir = tiny_run(tmp_path / "run")
    plan, folder = read_plan(run_dir), tmp_path / "export"
    made = split_by(BY_THREES)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    AutoConfig.for_model(model_type).save_pretrained(folder)
    why = why_others_differ(plan, folder)
    if differs:
        assert why.startswith("gives other tokens than training had, as of ")
        assert "Qwen2Tokenizer" in why
    else:
        assert why == ""
        theirs = AutoTokenizer.from_pretrained(folder)
        assert [theirs(text).input_ids for text in SAMPLES] == [made.encode(text).ids for text in SAMPLES]
    by_cure = PreTrainedTokenizerFast.from_pretrained(folder)
    assert [by_cure(text).input_ids for text in SAMPLES] == [made.encode(text).ids for text in SAMPLES]
