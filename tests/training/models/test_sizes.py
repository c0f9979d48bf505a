"""Counted parameters: those of models' own cards, and those of the models that we train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.configs import inventory, tiny_config
from training.models.language_model import LanguageModel, build_model, hf_config
from training.models.sizes import count_model, main
from training.planner.job import Job, Layout
from training.planner.model_shape import flops_per_token
from training.planner.plan import make_plan
from training.planner.price.step import rank_parameters, stage_parameters
from training.records.plan import RunPlan
from training.strategies.tensor import shard_matrices


def sizes(layers: int, width: int, heads: int, kv_heads: int, mlp: int, words: int, **more: Any) -> dict[str, Any]:
    """The fields that most config.json files share."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": words,
        **more,
    }


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
GPT_OSS = {"head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, **UNTIED}
QWEN3_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, **UNTIED}
# A model's name, its type, its config.json (defaults left out), its parameters as its card or its files' headers say,
# and billions that a token uses. gpt-oss's card says 3.6, without the embedding's 0.6.
CARDS: list[tuple[str, str, dict[str, Any], int, float | None]] = [
    ("Qwen3-0.6B", "qwen3", sizes(28, 1024, 16, 8, 3072, 151936, head_dim=128, **TIED), 596_049_920, None),
    ("Qwen3-8B", "qwen3", sizes(36, 4096, 32, 8, 12288, 151936, head_dim=128, **UNTIED), 8_190_735_360, None),
    ("Qwen3-30B-A3B", "qwen3_moe", sizes(48, 2048, 32, 4, 6144, 151936, **QWEN3_MOE), 30_532_122_624, 3.3),
    ("Llama-3.1-8B", "llama", sizes(32, 4096, 32, 8, 14336, 128256, **UNTIED), 8_030_261_248, None),
    ("Mistral-7B-v0.1", "mistral", sizes(32, 4096, 32, 8, 14336, 32000, **UNTIED), 7_241_732_096, None),
    ("Mixtral-8x7B", "mixtral", sizes(32, 4096, 32, 8, 14336, 32000, num_local_experts=8), 46_702_792_704, 12.9),
    ("gemma-2-2b", "gemma2", sizes(26, 2304, 8, 4, 9216, 256000, head_dim=256), 2_614_341_888, None),
    ("gemma-3-1b-pt", "gemma3_text", sizes(26, 1152, 4, 1, 6912, 262144, head_dim=256), 999_885_952, None),
    ("OLMo-2-1124-7B", "olmo2", sizes(32, 4096, 32, 32, 11008, 100352, **UNTIED), 7_298_617_344, None),
    ("granite-3.1-2b-base", "granite", sizes(40, 2048, 32, 8, 8192, 49155, **TIED), 2_533_531_648, None),
    ("DeepSeek-V3", "deepseek_v3", {}, 671_026_404_352, 37.0),
    ("gpt-oss-20b", "gpt_oss", sizes(24, 2880, 64, 8, 2880, 201088, **GPT_OSS), 20_914_757_184, 4.2),
    ("GPT-2", "gpt2", {}, 124_439_808, None),
    ("phi-2", "phi", sizes(32, 2560, 32, 32, 10240, 51200, **UNTIED), 2_779_683_840, None),
    ("pythia-160m", "gpt_neox", sizes(12, 768, 12, 12, 3072, 50304, **UNTIED), 162_322_944, None),
]


@pytest.mark.parametrize(("name", "kind", "config", "parameters", "used"), CARDS, ids=[card[0] for card in CARDS])
def test_planned_parameters_are_those_of_the_models_cards(
    name: str, kind: str, config: dict[str, Any], parameters: int, used: float | None
) -> None:
    shape = count_model(AutoConfig.for_model(kind, **config), objective="causal")
    assert shape.parameters == parameters
    job = Job.of(tiny_config(), shape, "bf16")
    assert job.is_gated == (kind not in {"gpt2", "phi", "gpt_neox"})
    if used is None:
        assert shape.sizes.used == parameters
        assert job.mlp_width == shape.mlp_width
    else:
        assert shape.sizes.used / 1e9 == pytest.approx(used, rel=0.02)


def own_plan(architecture: str, *, tied: bool = True) -> RunPlan:
    config = tiny_config(
        model__architecture=architecture,
        model__tie_embeddings=tied,
        model__kv_heads=2 if architecture == "llama" else 0,
        data__tokenizer={"vocab_size": 258},
    )
    return make_plan(config, inventory(1))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("tied", [True, False])
def test_our_own_shapes_are_planned_with_what_trains(architecture: str, tied: bool) -> None:
    """In each part: the layers, the ends, what tensor parallelism divides, what a token looks up."""
    plan = own_plan(architecture, tied=tied)
    found = count_model(hf_config(plan), objective=plan.config.objective)
    assert plan.shape.sizes == found.sizes.model_copy(update={"counted": plan.shape.sizes.counted})


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tp_rank_is_planned_with_what_it_holds(architecture: str, tied: bool, fake_ranks: DeviceMesh) -> None:
    plan = own_plan(architecture, tied=tied)
    model = build_model(plan)
    shard_matrices(model, fake_ranks)
    job = Job.of(plan.config, plan.shape, "fp32")
    layout = Layout("ddp", tp=2, pp=1, dp=1, micro_batch=1, accumulation=1)
    assert stage_parameters(job, layout) == sum(parameter.numel() for parameter in model.parameters())


TINY = sizes(2, 32, 4, 2, 48, 258)
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen3", {"head_dim": 16}),
        ("mixtral", {"num_local_experts": 4}),
        ("deepseek_v3", {**LATENT, **ROUTED, "v_head_dim": 8, "moe_intermediate_size": 16}),
        ("starcoder2", {}),
    ],
)
def test_a_tp_rank_of_any_family_is_planned_with_what_it_holds(
    kind: str, more: dict[str, Any], fake_ranks: DeviceMesh
) -> None:
    """Not all is divided: norms, routers and latent attention's first matrices lie whole on each rank."""
    settings = AutoConfig.for_model(kind, **{**TINY, **more})
    planned = count_model(settings, objective="causal").sizes
    model = LanguageModel(AutoModelForCausalLM.from_config(settings, dtype=torch.float32), precision="fp32")
    assert sum(parameter.numel() for parameter in model.parameters()) == planned.parameters
    shard_matrices(model, fake_ranks)
    assert sum(parameter.numel() for parameter in model.parameters()) == planned.parameters - planned.cut / 2


def test_stages_of_unlike_layers_have_what_lies_in_them() -> None:
    """DeepSeek-V3's first three layers are dense: the second of 61 stages is small, the last but one is not."""
    shape = count_model(AutoConfig.for_model("deepseek_v3"), objective="causal")
    job = Job.of(tiny_config(), shape, "bf16")
    layout = Layout("ddp", tp=8, pp=61, dp=1, micro_batch=1, accumulation=61)
    dense, experts = (rank_parameters(job, layout, stage) for stage in (1, 59))
    assert (dense, experts) == (583_483_392 - 396_361_728 * 7 / 8, 11_507_286_016 - 11_318_329_344 * 7 / 8)
    assert stage_parameters(job, layout) > experts, "the last one has the head too"
    whole = Layout("ddp", tp=1, pp=61, dp=1, micro_batch=1, accumulation=61)
    assert sum(rank_parameters(job, whole, stage) for stage in range(61)) == shape.parameters


def test_another_vocabulary_changes_the_words_alone() -> None:
    """A model that begins with random weights gets as many words as its tokenizer has."""
    for kind, config, words in [("mixtral", {"num_hidden_layers": 2}, 61), ("gpt2", {}, 61), ("phi", {}, 99_999)]:
        given = count_model(AutoConfig.for_model(kind, **config), objective="causal")
        wanted = count_model(AutoConfig.for_model(kind, vocab_size=words, **config), objective="causal")
        assert given.sizes.with_words(words - given.vocab_size) == wanted.sizes, kind


def test_work_is_that_of_the_experts_and_heads_that_a_token_meets() -> None:
    """6 x (used - looked up) + 12 x layers x heads x head size x context; a Qwen3's heads exceed width / heads."""
    settings = AutoConfig.for_model("qwen3_moe", **CARDS[2][2])
    shape = count_model(settings, objective="causal").model_copy(update={"context": 4096})
    assert flops_per_token(shape) == 6 * (3_353_032_704 - 151_936 * 2048) + 12 * 48 * 32 * 128 * 4096
    job = Job.of(tiny_config(), shape, "bf16")
    assert (job.q_width, job.kv_width, job.mlp_width) == (4096, 512, pytest.approx(8 * 768, rel=0.01))


def test_attention_that_a_hybrid_calls_a_mixer_has_scores() -> None:
    """Of Nemotron-H's layers, whose state spaces, experts and MLPs are mixers too."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300}
    shape = count_model(AutoConfig.for_model("nemotron_h", **sizes), objective="causal")
    assert (shape.sizes.attention_layers, shape.sizes.num_layers) == (1, 4)
    assert [layer.attention for layer in shape.sizes.layers if layer.attention] == [2 * 32 * 32 + 2 * 32 * 16]


def test_a_class_without_layers_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"a model of type gemma3, whose config\.json has none of hidden_size.*save its text part"
    ):
        count_model(AutoConfig.for_model("gemma3"), objective="causal")


def test_experts_that_a_config_names_in_a_part_of_it_are_counted() -> None:
    """dbrx keeps the matrices of all experts in one of two dimensions."""
    part = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}
    own = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 300}
    settings = AutoConfig.for_model("dbrx", **own, ffn_config=part, attn_config={"kv_n_heads": 2})
    settings.attn_config.rope_theta = 1e4
    shape = count_model(settings, objective="causal")
    assert shape.parameters - shape.sizes.used == 2 * 3 * (2 * 48) * 32  # in each layer two of four experts are idle


def test_the_program_names_a_type_that_transformers_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "tomorrow"}')
    assert main(tmp_path / "config.json", "causal", "n7") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("model.path: transformers 5.")
    for words in ("on node n7 cannot read its config.json", "model type `tomorrow`", "Choose a model of a type that"):
        assert words in line


def test_the_program_names_a_class_that_cannot_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    assert main(tmp_path / "config.json", "causal") == 2
    assert capsys.readouterr().err.startswith(
        "model.path holds a model of type t5, which cannot be built: Unrecognized configuration"
    )
