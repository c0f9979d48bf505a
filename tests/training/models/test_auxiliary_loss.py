"""What a class adds to its cross-entropy is trained and logged; what cannot be added is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.configs import reasons
from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import VOCAB, MakeRun
from tests.training.strategies.test_strategies import (
    COMMON,
    LOSS_BOUND,
    SMALL,
    WEIGHT_BOUND,
    assert_equal_training,
    final,
)
from training.config.train import learning_rate
from training.data.loader import Loader
from training.models.language_model import LanguageModel
from training.records.plan import RunPlan
from training.strategies.optim import BETA1, parameter_groups
from training.tracking.rows import read_rows

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
CLASSES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, **ROUTED},
    "qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, **ROUTED},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, **ROUTED},
    "jetmoe": {"kv_channels": 8, "num_local_experts": 4, "output_router_logits": True, "aux_loss_coef": 0.5},
    "bamba": {
        "z_loss_coefficient": 0.01,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "attn_layer_indices": [1],
    },
}


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **SIZES | CLASSES.get(model_type, {}) | {"use_cache": False} | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """folder("mixtral"): that class with random weights; made once."""
    made = tmp_path_factory.mktemp("models")

    def save(model_type: str) -> Path:
        if not (made / model_type).exists():
            torch.manual_seed(3)
            AutoModelForCausalLM.from_config(config_of(model_type)).save_pretrained(made / model_type)
        return made / model_type

    return save


def settings(folder: Path) -> dict[str, Any]:
    return COMMON | SMALL | {"model__architecture": "path", "model__init": "pretrained", "model__path": str(folder)}


def auxiliary_losses(plan_path: Path) -> dict[int, float]:
    rows = read_rows(plan_path.parent / "metrics.jsonl")
    return {row["step"]: row["auxiliary_loss"] for row in rows if "auxiliary_loss" in row}


@pytest.fixture(scope="module")
def alone(folder: Callable[[str], Path], make_run: MakeRun) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def run(model_type: str) -> Path:
        if model_type not in made:
            config = settings(folder(model_type)) | {"parallel__strategy": "single"}
            made[model_type] = make_run(f"alone {model_type}", **config)
            run_ranks(made[model_type])
        return made[model_type]

    return run


class Plain:
    """A plain loop of the loss that transformers' class returns, on the same micro-batches as the run."""

    def __init__(self, folder: Path, plan: RunPlan) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder).train()
        model.get_input_embeddings().padding_idx = None  # 0 is the end, which is trained here too
        train, loader = plan.config.train, Loader(plan, dp_rank=0, device=torch.device("cpu"))
        adamw = torch.optim.AdamW(
            parameter_groups(dict(model.named_parameters()), weight_decay=train.weight_decay),
            betas=(BETA1, train.beta2),
        )
        self.model, self.losses = model, list[float]()
        for step in range(plan.steps):
            for group in adamw.param_groups:
                group["lr"] = learning_rate(step, train, steps=plan.steps)
            batches, total = loader.share(step).batches, 0.0
            for batch in batches:
                labels = {"labels": batch.inputs, "shift_labels": batch.targets}  # without the latter it shifts labels
                loss = model(batch.inputs, **labels).loss / len(batches)
                loss.backward()
                total += loss.item()
            self.losses.append(total)
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
            adamw.step()
            adamw.zero_grad()


@pytest.mark.parametrize(
    "model_type", ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in CLASSES if name != "mixtral")]
)
def test_training_minimizes_the_loss_that_transformers_computes(
    model_type: str, folder: Callable[[str], Path], alone: Callable[[str], Path]
) -> None:
    plan_path = alone(model_type)
    plain = Plain(folder(model_type), RunPlan.read(plan_path))
    cross_entropies, added = losses(plan_path), auxiliary_losses(plan_path)
    assert cross_entropies.keys() == added.keys()
    for step, expected in enumerate(plain.losses, start=1):
        assert added[step] > 0
        assert cross_entropies[step] + added[step] == pytest.approx(expected, abs=LOSS_BOUND * expected)
    ours, theirs = final(plan_path), dict(plain.model.named_parameters())
    for name in ours:
        if name in theirs:
            assert (ours[name] - theirs[name].detach()).abs().max().item() < WEIGHT_BOUND, name


@pytest.mark.parametrize(
    "layout", ["ddp", "fsdp", "zero2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hsdp", "zero3"))]
)
def test_ranks_add_it_as_one_process_does(
    layout: str, folder: Callable[[str], Path], alone: Callable[[str], Path], make_run: MakeRun
) -> None:
    ranks, parallel = LAYOUTS[layout]
    plan_path = make_run(f"mixtral {layout}", ranks=ranks, **settings(folder("mixtral")), **parallel)
    run_ranks(plan_path)
    assert_equal_training(alone("mixtral"), plan_path)
    expected, added = auxiliary_losses(alone("mixtral")), auxiliary_losses(plan_path)
    assert added == pytest.approx(expected, abs=LOSS_BOUND * expected[1])


@pytest.mark.slow
def test_it_is_added_through_recomputed_layers_too(
    folder: Callable[[str], Path], alone: Callable[[str], Path], make_run: MakeRun
) -> None:
    again = {"train__activation_checkpointing": "full", "parallel__strategy": "single"}
    plan_path = make_run("mixtral recomputed", **settings(folder("mixtral")), **again)
    run_ranks(plan_path)
    assert_equal_training(alone("mixtral"), plan_path)


@pytest.mark.parametrize("mesh", ["tp", "pp", "cp"])
def test_meshes_that_cut_the_model_are_refused_when_the_run_is_planned(
    mesh: str, folder: Callable[[str], Path], make_run: MakeRun
) -> None:
    with pytest.raises(
        ValueError, match=f"models of type mixtral cannot be split by parallel.{mesh} = 2: its config.json asks for"
    ):
        make_run(f"mixtral {mesh}", ranks=2, **settings(folder("mixtral")), **{f"parallel__{mesh}": 2})


def test_compiled_layers_are_refused_when_the_run_is_planned(folder: Callable[[str], Path], make_run: MakeRun) -> None:
    with pytest.raises(ValueError, match="output_router_logits=true, and the balance loss cannot be collected from"):
        make_run("mixtral compiled", **settings(folder("mixtral")), train__compile=True)


def test_the_plan_says_what_is_added_and_that_further_words_are_not_predicted(
    tmp_path: Path, make_run: MakeRun
) -> None:
    config_of("mixtral", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    plan = RunPlan.read(make_run("said", **settings(tmp_path) | {"model__init": "random"}))
    loss, further = reasons(plan, "loss: ")
    assert "output_router_logits=true in config.json adds the class's balance loss" in loss
    assert "the metric auxiliary_loss is the mean of a step's micro-batches" in loss
    assert "num_nextn_predict_layers=1; the class that transformers trains has no such layers" in further


def batch(rows: int = 2) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    inputs = torch.randint(2, VOCAB, (rows, 16))
    return inputs, inputs.roll(-1, 1)


def hf_of(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config_of(model_type, **changes))


def model_of(model_type: str, **changes: Any) -> LanguageModel:
    return LanguageModel(hf_of(model_type, **changes), precision="fp32")


@pytest.mark.parametrize("model_type", ["mixtral", "bamba"])
def test_validation_is_cross_entropy_alone(model_type: str) -> None:
    model = model_of(model_type).eval()
    inputs, targets = batch()
    with torch.no_grad():
        logits = model.hf(inputs).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        assert model(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert model.auxiliary.take() is None


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_micro_batch_of_padding_alone_adds_nothing(model_type: str) -> None:
    model = model_of(model_type)
    inputs, targets = batch()
    loss = model(inputs, torch.full_like(targets, -100), None, torch.full_like(inputs, -1))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_class_without_the_balance_loss_that_its_config_asks_for_is_refused() -> None:
    model = model_of("mistral", output_router_logits=True)
    with pytest.raises(ValueError, match="MistralForCausalLM computes none: set output_router_logits to false"):
        model(*batch())


def test_a_loss_of_further_words_is_refused() -> None:
    hf = hf_of("qwen2")
    forward = hf.forward

    def predict_two_words(input_ids: Tensor, labels: Tensor | None = None) -> Any:
        result = forward(input_ids=input_ids, labels=labels)
        result.loss = result.loss + hf.loss_function(result.logits[:, :-1], labels[:, 1:], vocab_size=VOCAB)
        return result

    hf.forward = predict_two_words
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM computes 2 cross-entropies .* set the number"):
        LanguageModel(hf, precision="fp32")(*batch())


def bart() -> Any:
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "dropout": 0.0}
    config = AutoConfig.for_model("bart", vocab_size=VOCAB, **sizes)
    return AutoModelForCausalLM.from_config(config)


def test_a_class_that_computes_cross_entropy_itself_trains() -> None:
    model = LanguageModel(bart(), precision="fp32")
    inputs, targets = batch()
    assert model(inputs, targets).item() == pytest.approx(model.eval()(inputs, targets).item(), rel=1e-6)
    assert model.auxiliary.take() is None


def test_a_class_that_computes_another_loss_itself_is_refused() -> None:
    hf = bart()
    forward = hf.forward

    def with_another_loss(input_ids: Tensor, labels: Tensor | None = None) -> Any:
        result = forward(input_ids=input_ids, labels=labels)
        result.loss = result.loss + 1
        return result

    hf.forward = with_another_loss
    with pytest.raises(ValueError, match="BartForCausalLM trains with a loss of its own"):
        LanguageModel(hf, precision="fp32")(*batch())
