"""Types of models with little in common train under every mesh as one process trains them, or are refused by name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from packaging.requirements import Requirement
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from tests.support.families import UNLIKE, counted, refusals, report, why_not_planned
from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.repository import REPO
from tests.support.tiny_configs import all_types, has_plan, is_masked, missing_kinds, tiny_config
from tests.support.tiny_shards import VOCAB, MakeRun
from tests.training.strategies.test_strategies import COMMON, DATA, SMALL, WEIGHT_BOUND, assert_equal_training
from training.facts import families
from training.facts.families import Ability, can
from training.models.family import Tail, family_of
from training.models.language_model import LanguageModel
from training.models.linear_cross_entropy import linear_cross_entropy, linear_scores

STEPS = 6
SPLIT_BOTH_WAYS = {"parallel__pp": 2, "parallel__tp": 2}


def admitted(*types: str) -> dict[str, Any]:
    """What the admission test counts."""
    command = [sys.executable, "-m", "tests.support.families", *types]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["silently_wrong"] == 0, done.stderr
    return found


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_moe", "gemma4_text", "jamba", "deepseek_v4", "doge"])
def test_a_tiny_config_has_every_kind_of_layer_of_its_class(model_type: str) -> None:
    assert missing_kinds(model_type) == []


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_type_that_is_admitted_was_built_with_every_kind_of_layer() -> None:
    types = families._table()["types"]
    assert types.keys() == {*all_types()}
    assert not {name: lacking for name in types if "*" not in types[name] and (lacking := missing_kinds(name))}


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "fnet", "gemma4_text", "dots3_note_text", "lfm2"])
def test_a_type_that_is_admitted_is_planned(model_type: str) -> None:
    """Mamba and FNet have no heads; Gemma 4's and dots3's layers differ in them."""
    assert any(can(model_type, ability) for ability in get_args(Ability))
    assert why_not_planned(model_type) is None


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_type_is_planned_or_refused_by_its_name() -> None:
    refused = {name: why for name in all_types() if (why := why_not_planned(name))}
    assert not [name for name, why in refused.items() if name not in why]
    assert not [name for name in refused if any(can(name, ability) for ability in get_args(Ability))]


@pytest.mark.slow
def test_a_dozen_unlike_types_are_equal_as_the_table_says() -> None:
    found = admitted(*UNLIKE)
    assert found["equal_pp"] == found["equal_tp"] == found["equal_pp_tp"] == found["types"] >= 9
    assert found["equal_fsdp_tp_pp"] == found["types"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nearly_every_type_that_has_a_plan_is_equal() -> None:
    found = admitted()
    assert found["equal_pp"] >= 0.92 * found["types"]
    assert found["equal_tp"] >= 0.92 * found["types"]
    assert found["equal_fsdp_tp_pp"] >= 0.87 * found["types"]


def test_what_is_right_with_pp_and_with_tp_but_not_with_both_is_refused_together(
    folder: Callable[[str], Path],
    make_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    together = {"pp_tp": "its loss is 2.0 instead of 1.0"}
    report({"qwen3": together}, {}, write=False)
    counts = json.loads(capsys.readouterr().out)
    assert (counts["equal_pp"], counts["equal_tp"], counts["equal_pp_tp"], counts["silently_wrong"]) == (1, 1, 0, 1)
    monkeypatch.setitem(families._table()["types"], "qwen3", refusals(together))
    config = settings("qwen3", folder("qwen3"))
    for axis in ("pp", "tp"):
        make_run(f"by {axis}", ranks=2, **config | {f"parallel__{axis}": 2})
    words = r"cannot be split by parallel.pp = 2 and parallel.tp = 2: its admission test failed"
    for asked in ({"parallel__pp": 2}, {"parallel__stages": ((2, 2),)}):
        with pytest.raises(ValueError, match=words):
            make_run("refused", ranks=4, **config | {"parallel__tp": 2} | asked)


def test_what_is_wrong_only_under_fsdp_is_refused_only_there(
    folder: Callable[[str], Path], make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families._table()["types"], "qwen3", refusals({"fsdp_tp_pp": "its loss is 2.0 instead of 1.0"}))
    config = settings("qwen3", folder("qwen3")) | SPLIT_BOTH_WAYS
    make_run("replicas", ranks=8, **config, parallel__strategy="auto")
    words = "parallel.tp = 2 with parallel.strategy = fsdp: its admission test failed for fsdp_tp_pp"
    with pytest.raises(ValueError, match=words):
        make_run("refused", ranks=8, **config, parallel__strategy="fsdp")


def test_the_pages_count_types_as_the_table_does() -> None:
    table = json.loads(families.TABLE.read_text())
    types, release = table["types"], table["transformers"].rpartition(".")[0]
    found, planned = counted(types, can), {name for name in types if has_plan(name)}
    assert found["equal_cp"] == found["equal_documents"]
    known = [name for name, refused in types.items() if "*" not in refused]
    compiled = f"{sum(can(name, 'compile') for name in known)} of {len(known)} types"
    words = " ".join((REPO / "docs" / "training.md").read_text().split())
    for sentence in (
        f"builds each type of transformers {release} tiny",
        f"types that transformers {release} has a tp plan for",
        "Of the {types} types",
        "for, {equal_pp} are equal as stages of a pipeline, {equal_tp} under tp, {equal_pp_tp} under both, "
        "{equal_fsdp_tp_pp} under fsdp, tp and pp together, {equal_documents} with documents and under cp, "
        "{equal_sp} with sequence parallelism; {refused} are refused",
        f"among them, {sum(can(name, 'pp') for name in types.keys() - planned)} more have stages",
        f"({compiled};",
    ):
        assert sentence.format(**found) in words


def test_transformers_is_admitted_up_to_the_release_that_was_tested() -> None:
    tested = json.loads(families.TABLE.read_text())["transformers"]
    major, minor = map(int, tested.split(".")[:2])
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, itertools.chain(project["dependencies"], *project["optional-dependencies"].values()))
    bounds = [each.specifier for each in needed if each.name == "transformers"]
    assert bounds
    for bound in bounds:
        assert bound.contains(tested)
        assert bound.contains(f"{major}.{minor}.99")
        assert not bound.contains(f"{major}.{minor + 1}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder("gemma3_text"): the config.json of a tiny model of that type; made once."""
    made = tmp_path_factory.mktemp("families")

    def save(model_type: str) -> Path:
        config = tiny_config(model_type)
        config.save_pretrained(made / model_type)
        return made / model_type

    return save


def settings(model_type: str, path: Path) -> dict[str, Any]:
    kind = "bert" if is_masked(model_type) else "path"
    more = {"train__steps": STEPS, "evaluation__samples_while_training": 0, "evaluation__prompts": []}
    return COMMON | SMALL | more | {"model__architecture": kind, "model__path": str(path)}


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path], make_run: MakeRun) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def run(model_type: str, packing: str = "stream") -> Path:
        name = f"alone {model_type} {packing}"
        if name not in made:
            config = settings(model_type, folder(model_type)) | {
                "parallel__strategy": "single",
                "train__micro_batch": 8,
            }
            made[name] = make_run(name, **config | DATA[packing])
            run_ranks(made[name])
        return made[name]

    return run


@pytest.mark.parametrize(
    ("model_type", "layout", "packing"),
    [
        ("qwen3_moe", "pp interleaved", "stream"),
        pytest.param("gemma3_text", "tp", "stream", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "fsdp x tp x pp", "stream", marks=pytest.mark.long),
        pytest.param("gemma2", "cp", "stream", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "fsdp", "uneven", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "zero3", "stream", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "hsdp 4", "stream", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "zero2", "stream", marks=pytest.mark.slow),
        pytest.param("qwen3", "local-sgd", "stream", marks=pytest.mark.slow),
        pytest.param("granite", "unequal pp", "stream", marks=pytest.mark.slow),
        pytest.param("qwen3", "sp", "stream", marks=pytest.mark.slow),
        pytest.param("cohere2", "dp x tp", "uneven", marks=pytest.mark.long),
        pytest.param("lfm2", "zero1 x pp", "stream", marks=pytest.mark.long),
        pytest.param("modernbert", "fsdp x pp", "stream", marks=pytest.mark.long),
        pytest.param("roberta", "pp", "stream", marks=pytest.mark.slow),
        pytest.param("mamba", "pp", "stream", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "tp", "stream", marks=pytest.mark.long),
    ],
)
def test_ranks_train_a_family_as_one_process_does(
    model_type: str,
    layout: str,
    packing: str,
    folder: Callable[[str], Path],
    alone: Callable[..., Path],
    make_run: MakeRun,
) -> None:
    ranks, overrides = LAYOUTS[layout]
    config = settings(model_type, folder(model_type)) | DATA[packing] | overrides
    plan_path = make_run(f"{model_type} {layout} {packing}", ranks=ranks, **config)
    run_ranks(plan_path)
    expected = alone(model_type, packing)
    # Gemma scales norms by 1 + weight: gradients are unlike in size, and AdamW magnifies rounding more.
    assert_equal_training(expected, plan_path, bound=5 * WEIGHT_BOUND)
    assert losses(plan_path)[STEPS] < losses(plan_path)[1]


def tiny(model_type: str, **named: Any) -> Any:
    auto = AutoModelForMaskedLM if is_masked(model_type) else AutoModelForCausalLM
    config = tiny_config(model_type)
    config.update(named)
    return auto.from_config(config)


def test_what_a_model_is_made_of_is_found() -> None:
    gemma, gpt2, bert = (family_of(tiny(model_type)) for model_type in ("gemma3_text", "gpt2", "bert"))
    assert (gemma.layers, gemma.before, gemma.after) == (
        "model.layers",
        ("model.embed_tokens",),
        ("model.norm", "lm_head"),
    )
    assert gemma.tail == Tail(cap=30.0)
    assert gemma.styles["model.layers.3.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert gpt2.before == ("transformer.wte", "transformer.wpe")
    assert gpt2.styles["transformer.h.0.attn.c_attn"] == "packed_colwise 3"
    assert bert.head == "cls.predictions.decoder"
    assert bert.before[-1] == "bert.embeddings.LayerNorm"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "granite", "bert"])
def test_what_a_model_is_made_of_is_the_same_in_half_precision(model_type: str, dtype: torch.dtype) -> None:
    """gemma3_text caps its logits, granite divides them by 8."""
    model = tiny(model_type)
    whole = family_of(model)
    assert family_of(model.to(dtype)) == whole


def test_a_model_of_fewer_words_than_the_traced_forward_reads_is_found() -> None:
    assert family_of(tiny("llama", vocab_size=3)).head == "lm_head"


def test_a_model_that_runs_whole_says_why_and_what_to_set() -> None:
    model, ids = LanguageModel(tiny("albert"), precision="fp32"), torch.full((1, 4), 5)
    with pytest.raises(ValueError, match=r"AlbertForMaskedLM .* only whole: .+: set parallel\.tp=1"):
        model.known_family()
    with pytest.raises(ValueError, match=r"only whole: .+: set train\.packing=padded"):
        model(ids, ids, positions=torch.arange(4)[None])


@pytest.mark.parametrize("model_type", ["albert", "hrm_text"])
def test_layers_that_form_no_chain_are_no_family(model_type: str) -> None:
    """ALBERT calls one layer several times, HRM its layers in two loops."""
    with pytest.raises(ValueError, match="its layers are no chain"):
        family_of(tiny(model_type))
    assert not can(model_type, "pp")


@pytest.mark.parametrize("tail", [Tail(scale=0.25), Tail(cap=3.0), Tail(scale=4.0, cap=2.0)])
def test_the_loss_in_chunks_has_the_tail_of_its_class(tail: Tail) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(150, 16, requires_grad=True)
    targets = torch.randint(150, (40,))
    targets[3] = -100
    logits = tail(hidden @ weight.t())
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    got = linear_cross_entropy(hidden, weight, None, targets, tail=tail)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(got, [hidden, weight]), torch.autograd.grad(expected, [hidden, weight]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    by_token, _ = linear_scores(hidden.detach(), weight.detach(), None, targets, tail=tail)
    assert by_token.sum().item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("model_type", "overrides", "words"),
    [
        ("bloom", {"train__packing": "documents"}, "models of type bloom cannot: its forward takes no positions"),
        ("lfm2", {"train__packing": "documents"}, "models of type lfm2 cannot: its admission test failed"),
        ("lfm2", {"train__packing": "best-fit"}, "models of type lfm2 cannot: its admission test failed"),
        ("lfm2", {"parallel__cp": 2}, "models of type lfm2 cannot"),
        ("gpt_neo", {"parallel__cp": 2}, "models of type gpt_neo cannot"),
        (
            "opt",
            {"parallel__tp": 2},
            "models of type opt cannot be split by parallel.tp = 2: transformers has no",
        ),
        ("biogpt", {"parallel__pp": 2}, r"its admission test failed for pp \(details: training/facts/families\.json\)"),
        ("phi4_multimodal", {"parallel__pp": 2}, "belongs to no stage"),
        (
            "albert",
            {"parallel__pp": 2},
            "models of type albert cannot be split by parallel.pp = 2: its layers are no chain",
        ),
    ],
)
def test_what_a_type_cannot_do_is_refused_by_its_name(
    model_type: str,
    overrides: dict[str, Any],
    words: str,
    folder: Callable[[str], Path],
    make_run: MakeRun,
) -> None:
    with pytest.raises(ValueError, match=words):
        make_run("refused", ranks=2, **settings(model_type, folder(model_type)) | overrides)


def test_key_value_heads_of_some_layers_are_shared_too(folder: Callable[[str], Path], make_run: MakeRun) -> None:
    path = folder("mimo_v2_flash")
    config = AutoConfig.from_pretrained(path)
    config.swa_num_key_value_heads = 1
    config.save_pretrained(path)
    with pytest.raises(ValueError, match=r"1 key/value heads cannot be shared by parallel\.tp = 2"):
        make_run("refused", ranks=2, **settings("mimo_v2_flash", path) | {"parallel__tp": 2})


def test_masked_and_next_words_have_one_cure_each(folder: Callable[[str], Path], make_run: MakeRun) -> None:
    for model_type in ("xlm-roberta", "modernbert"):
        config = settings(model_type, folder(model_type))
        with pytest.raises(ValueError, match=r"set model\.architecture=bert"):
            make_run("path", **config | {"model__architecture": "path"})
        make_run(f"{model_type} planned", **config)
    assert AutoConfig.from_pretrained(folder("modernbert")).vocab_size != VOCAB, "the corpus decides"
