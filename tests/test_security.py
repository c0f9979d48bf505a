"""What docs/security.md promises of the code: nothing is unpickled, nothing goes through a shell, names stay names."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from flows.cli.command import main
from flows.presets import load_config, with_overrides
from tasks.display.markdown import escape_markdown
from tasks.planning.pretrained import hf_config
from tasks.workspace.paths import run_folder
from training.config.run import RunConfig

REPO = Path(__file__).parents[1]
ROOMS = ("flows", "tasks", "training", "infra", "benchmarks")
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNPICKLING_CALLS = ("torch.jit.load", "torch.distributed.checkpoint", "pandas.read_pickle", "pd.read_pickle")
HOSTILE = (
    "../outside",
    "..",
    ".",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "-o",
    "--help",
    "$(touch canary)",
    "`touch canary`",
    "a;touch canary",
    "a|b",
    "a&b",
    "a b",
    "a'b",
    'a"b',
    "a\nb",
    "a\n",
    "a\0b",
    "ａ/ｂ",
    "{0.__class__}",
    "%2e%2e",
)


@functools.cache
def trees() -> dict[Path, ast.Module]:
    paths = [path for room in ROOMS for path in sorted((REPO / room).rglob("*.py"))]
    return {path.relative_to(REPO): ast.parse(path.read_text()) for path in paths}


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(place, dotted name of what is called, its keywords) of all our code."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                given: dict[str, Any] = {
                    word.arg: word.value.value if isinstance(word.value, ast.Constant) else word.value
                    for word in node.keywords
                    if word.arg
                }
                yield f"{path}:{node.lineno}", ast.unparse(node.func), given


def test_nothing_of_ours_unpickles_or_runs_code_that_came_with_a_model() -> None:
    found = []
    for place, name, given in calls():
        last = name.rpartition(".")[2]
        allowed = [given.get(switch, False) for switch in ("trust_remote_code", "allow_pickle")]
        if name.startswith(UNPICKLING_CALLS) or allowed != [False, False]:
            safe = False
        elif last == "load" and name.split(".")[0] in {"torch", "np", "numpy"}:
            safe = given.get("weights_only") is True if name.startswith("torch") else "allow_pickle" not in given
        elif last == "from_pretrained" and name != "GenerationConfig.from_pretrained":  # which reads JSON alone
            safe = given.get("trust_remote_code") is False
            safe = safe and ("dtype" not in given or given.get("use_safetensors") is True)  # with dtype: weights
        else:
            continue
        if not safe:
            found.append(f"{place}: {name}")
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}: imports {name}" for name in names if name.split(".")[0] in UNPICKLING]
    assert found == []


def test_nothing_of_ours_goes_through_a_shell_or_is_evaluated() -> None:
    evaluating = {"eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "yaml.load", "yaml.unsafe_load"}
    found = [
        f"{place}: {name}"
        for place, name, given in calls()
        if name in evaluating or given.get("shell", False) is not False
    ]
    assert found == []


@pytest.mark.parametrize("field", ["name", "registry.model_name", "launch.hosts.name", "launch.user"])
def test_what_becomes_a_files_or_models_name_cannot_be_a_path_an_option_or_a_command(field: str) -> None:
    accepted = []
    for value in HOSTILE:
        section, _, last = field.rpartition(".")
        content: dict[str, Any] = {last: value}
        for part in reversed(section.split(".") if section else []):
            content = {part: [content] if part == "hosts" else content}
        try:
            RunConfig.model_validate(content)
            accepted.append(value)
        except ValidationError:
            continue
    assert accepted == []


def test_a_runs_id_cannot_leave_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    for value in HOSTILE:
        try:
            folder = run_folder(value)
        except ValueError:
            continue
        assert folder.parent == tmp_path.resolve(), value
        assert folder.resolve().parent == tmp_path.resolve(), value


def test_settings_of_nccl_cannot_set_any_other_variable() -> None:
    for name in ("LD_PRELOAD", "PYTHONPATH", "PATH", "NCCL_X=1;LD_PRELOAD", "nccl_debug"):
        with pytest.raises(ValidationError, match="nccl"):
            RunConfig.model_validate({"launch": {"nccl": {name: "x"}}})
    launch = RunConfig.model_validate({"launch": {"nccl": {"NCCL_IB_HCA": "mlx5_0", "FI_PROVIDER": "efa"}}}).launch
    assert launch.nccl == {"NCCL_IB_HCA": "mlx5_0", "FI_PROVIDER": "efa"}


def test_an_overrides_value_is_text_and_never_python(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    value = f"!!python/object/apply:os.system ['touch {canary}']"
    assert with_overrides({}, [f"data.path={value}"]).data.path == value
    config = tmp_path / "config.yaml"
    config.write_text(f"name: {value}\n")
    with pytest.raises((ValueError, yaml.YAMLError)):
        load_config(str(config))
    assert not canary.exists()


class Canary:
    """Unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with its weights as safetensors."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16)).save_pretrained(folder)
    return folder


def pretrained(folder: Path) -> RunConfig:
    return RunConfig.model_validate({"model": {"init": "pretrained", "path": str(folder)}})


def plant(folder: Path, canary: Path) -> None:
    import torch

    torch.save({"transformer.wte.weight": Canary(canary)}, folder / "pytorch_model.bin")
    (folder / "modeling_planted.py").write_text(f"open({str(canary)!r}, 'w')\n")
    config = (folder / "config.json").read_text().rstrip().removesuffix("}")
    auto_map = '"auto_map": {"AutoModelForCausalLM": "modeling_planted.M", "AutoConfig": "modeling_planted.C"}'
    (folder / "config.json").write_text(f"{config}, {auto_map}}}")


def test_a_pickle_planted_in_a_model_is_never_read(model_folder: Path, tmp_path: Path) -> None:
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    canary, folder = tmp_path / "canary", tmp_path / "model"
    shutil.copytree(model_folder, folder)
    plant(folder, canary)
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert canary.exists(), "read without care, it would run"
    canary.unlink()

    hf_config(pretrained(folder).model)
    AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
    assert not canary.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle, .* save_pretrained"):
        hf_config(pretrained(folder).model)
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, trust_remote_code=False)
    assert not canary.exists()


def test_a_models_index_cannot_lead_out_of_its_folder(model_folder: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").rename(tmp_path / "another.safetensors")
    for name in ("../another.safetensors", str(tmp_path / "another.safetensors"), "sub/another.safetensors"):
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"names the file .*(leads out of its folder|in a folder of its own)"):
            hf_config(pretrained(folder).model)


def test_names_of_a_corpus_are_no_markup_in_prefect_and_mlflow() -> None:
    assert escape_markdown("![a](http://x/y.png) <b> | `c` [d](javascript:e)") == (
        r"\!\[a\]\(http://x/y.png\) \<b\> \| \`c\` \[d\]\(javascript:e\)"
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_model_is_served_beyond_loopback_with_tokens_or_if_told_so(
    host: str, embedded_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reached = "the registry has no tiny"
    for more, message in (
        (("--host", host), "--without-tokens"),
        (("--host", host, "--replicas", "2"), "--without-tokens"),
        (("--host", "localhost"), reached),
        (("--host", "::1"), reached),
    ):
        assert main(["serve", "tiny", "--port", "0", *more]) == 2
        assert message in capsys.readouterr().err
    for more in (("--without-tokens",), ("serving.token_file=tokens",)):
        assert main(["serve", "tiny", "--port", "0", "--host", "127.0.0.1", *more]) == 2
        assert reached in capsys.readouterr().err
