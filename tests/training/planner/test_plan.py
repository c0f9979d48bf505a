"""The plan: exact parameter counts, what it derives, and what it refuses with which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.configs import gpus, inventory, reasons, tiny_config
from training.models.sizes import count_model
from training.planner.model_shape import flops_per_token
from training.planner.plan import make_plan
from training.planner.precision import choose_precision
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.shards.packing import Epoch, Packing, one_epoch

EPOCH = (Epoch(sequences=100, tokens=1600),)


def test_a_plan_divides_the_global_batch_exactly() -> None:
    plan = make_plan(tiny_config(train__global_batch=48, train__micro_batch=3), inventory(8, 8, kind="cuda"))
    assert plan.world_size == 16
    assert plan.ranks_per_host == (8, 8)
    assert plan.world_size * plan.micro_batch * plan.accumulation == 48
    assert plan.batch_tokens == 48 * 16


def test_automatic_ranks_divide_the_batch_and_say_who_stays_idle() -> None:
    plan = make_plan(tiny_config(train__global_batch=12, train__micro_batch=0), inventory(8, kind="cuda"))
    assert plan.world_size == 6
    assert reasons(plan, "2 stay idle")


def test_the_same_inputs_give_the_same_plan() -> None:
    assert make_plan(tiny_config(), inventory(2)) == make_plan(tiny_config(), inventory(2))


def test_zero_stages_shard_optimizer_then_gradients_then_weights() -> None:
    parts = {
        strategy: make_plan(tiny_config(parallel__strategy=strategy), inventory(4, kind="cuda")).predicted.memory_gib
        for strategy in ("ddp", "zero1", "zero2", "zero3")
    }
    for strategy, sharded in {"zero1": {"optimizer"}, "zero2": {"optimizer", "gradients"}}.items():
        for part in ("weights", "gradients", "optimizer"):
            share = parts[strategy][part] / parts["ddp"][part]
            assert share == pytest.approx(0.25 if part in sharded else 1.0)
    assert parts["zero3"]["weights"] == pytest.approx(parts["ddp"]["weights"] / 4)


def test_16_bits_on_a_cpu_save_time_in_products_alone() -> None:
    """What lies between products is arithmetic there, which takes no less time in bf16, and attention takes more."""
    here = inventory(2)
    device = here.hosts[0].devices[0].model_copy(update={"matmul_tflops": {"fp32": 0.2, "bf16": 0.4}})
    here = Inventory(hosts=(here.hosts[0].model_copy(update={"devices": (device, device)}),))

    def parts(strategy: str, precision: str) -> dict[str, float]:
        config = tiny_config(parallel__strategy=strategy, parallel__precision=precision, model__dropout=0.0)
        return make_plan(config, here).predicted.step_s

    fp32, bf16, carried = parts("ddp", "fp32"), parts("ddp", "bf16"), parts("fsdp", "bf16")
    assert bf16["products"] < 0.6 * fp32["products"]
    assert bf16["memory-bound"] >= 0.99 * fp32["memory-bound"]
    assert bf16["attention"] > fp32["attention"]
    assert carried["memory-bound"] > bf16["memory-bound"]
    auto = tiny_config(parallel__strategy="auto", parallel__precision="auto", model__dropout=0.0)
    assert (make_plan(auto, here).strategy, make_plan(auto, here).precision) == ("ddp", "bf16")


def test_flops_per_token_of_gpt2_small() -> None:
    """PaLM's formula for GPT-2 small at 1024 tokens: 6 x (124.4 M - 0.8 M positions) + 12 x 12 x 768 x 1024."""
    config = tiny_config(
        model__architecture="gpt2", model__layers=12, model__width=768, model__heads=12, model__kv_heads=0
    )
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"context": 1024}),
            "data": config.data.model_copy(
                update={"tokenizer": config.data.tokenizer.model_copy(update={"vocab_size": 50257})}
            ),
        }
    )
    plan = make_plan(config, inventory(1, kind="cuda", memory_gib=80))
    assert plan.shape.parameters == 124_439_808
    assert flops_per_token(plan.shape) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024


REFUSED = [
    ({"parallel__strategy": "zero2", "parallel__pp": 2}, (1,), "parallel.pp = 2 runs with parallel.strategy=ddp"),
    ({"parallel__strategy": "zero3", "parallel__tp": 2}, (1,), "parallel.tp = 2 runs with parallel.strategy=ddp, fsdp"),
    ({"parallel__strategy": "ddp", "parallel__offload": "optimizer"}, (1,), "parallel.offload=optimizer is not there"),
    ({"parallel__pp_stages_per_rank": 2}, (1,), "needs a pipeline: set parallel.pp above 1"),
    ({"parallel__strategy": "zero3", "train__compile": True}, (1,), "train.compile=true cannot be had with"),
    ({"parallel__ranks": 4}, (2,), "parallel.ranks = 4, but 1 host with 2 devices: lower parallel.ranks"),
    (
        {"train__micro_batch": 3},
        (1,),
        "8 sequences per data-parallel rank .* are not a multiple of train.micro_batch = 3",
    ),
    ({"parallel__pp": 4}, (1,), "1 nodes x 1 devices = 1 ranks, not divisible by tp.pp = 4"),
    ({"parallel__tp": 3}, (3,), "4 attention heads cannot be shared by parallel.tp = 3"),
    ({"parallel__tp": 4}, (4,), "2 key/value heads cannot be shared by parallel.tp = 4: choose a tp that divides 2"),
    ({"parallel__pp": 3}, (3,), "2 layers cannot fill .* = 3 stages: lower parallel.pp"),
    (
        {"parallel__pp": 2, "train__micro_batch": 8},
        (2,),
        "1 micro-batches per step .* parallel.pp = 2 needs at least 2",
    ),
    ({"parallel__tp": 4}, (2,), r"1 nodes x 2 devices = 2 ranks, not divisible by tp\*pp = 4: change parallel.tp"),
    (
        {"model__width": 65_536, "model__layers": 100, "model__kv_heads": 0},
        (1,),
        "does not fit on cpu.*too few: use more devices, or a smaller model",
    ),
]


@pytest.mark.parametrize(("overrides", "hosts", "message"), REFUSED)
def test_what_cannot_work_is_refused_with_numbers_and_cure(
    overrides: dict[str, Any], hosts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(tiny_config(**overrides), inventory(*hosts))


def test_a_disk_too_small_for_the_checkpoints_is_refused_before_training() -> None:
    config = tiny_config(model__width=1024, model__heads=16, model__kv_heads=0, model__layers=24)
    with pytest.raises(ValueError, match=r"2 \+ 1 checkpoints of .* host0 has 1.0 GiB free: free some"):
        make_plan(config, inventory(1, kind="cuda", memory_gib=80, disk_gib=1.0))


def test_the_weakest_gpu_decides_the_precision_and_is_named() -> None:
    assert choose_precision(gpus("8.0", "9.0"))[0] == "bf16"
    precision, why = choose_precision(gpus("8.6", "7.5"))
    assert precision == "fp16"
    assert "the weakest of 2 devices, device 1 of h (GPU 7.5), has compute capability 7.5" in why
    assert choose_precision(gpus("9.0", "6.1"))[0] == "fp32"
    with pytest.raises(ValueError, match=r"no bf16 \(from 8\.0 on\): use auto or fp32"):
        make_plan(tiny_config(parallel__precision="bf16"), gpus("7.5"))


PADDED = (Epoch(sequences=100, tokens=640),)  # 40% full on average


@pytest.mark.parametrize(
    ("epoch", "train", "length"),
    [
        (EPOCH, {"steps": 9}, (9, 72)),
        (EPOCH, {"steps": 9, "max_tokens": 5 * 128 + 127}, (5, 40)),
        (EPOCH, {"steps": 9, "max_tokens": 10_000}, (9, 72)),
        (EPOCH, {"max_tokens": 10_000, "max_epochs": 1}, (13, 100)),
        (EPOCH, {"max_epochs": 1}, (13, 100)),  # within a batch
        (EPOCH, {"max_epochs": 2}, (25, 200)),
        (EPOCH, {"max_epochs": 0.29}, (4, 29)),
        (EPOCH, {"max_epochs": 0.001}, (1, 1)),
        (EPOCH, {"max_tokens": 640}, (5, 40)),
        (PADDED, {"max_tokens": 640, "packing": "padded"}, (12, 96)),  # padding does not count
        (None, {"max_epochs": 1}, (1000, 8000)),  # a dry run cannot count it
    ],
)
def test_the_first_limit_that_is_reached_ends_the_run(
    epoch: tuple[Epoch, ...] | None, train: dict[str, Any], length: tuple[int, int]
) -> None:
    """Steps and sequences, with 8 sequences of 16 tokens in a batch."""
    fields = {f"train__{field}": value for field, value in ({"steps": 1000} | train).items()}
    plan = make_plan(tiny_config(**fields), inventory(1), epoch=epoch)
    assert (plan.steps, plan.sequences) == length


@pytest.mark.parametrize(
    ("share", "steps", "why"),
    [
        (2.0, 1000, "1000 steps: train.steps"),
        (
            0.5,
            500,
            r"500 steps: train.target_minutes = \S+; a step takes 24 ms .* takes all 1,000, about 24 s of training",
        ),
        (0.01, 200, r"200 steps: .*, and 200 is the minimum, 20% of train.steps; train.target_minutes=0 takes all"),
    ],
)
def test_minutes_become_steps_by_the_predicted_speed_within_bounds(share: float, steps: int, why: str) -> None:
    """A machine that was busy while it was measured, and looks a hundred times slower, still trains for a while."""
    in_all_s = make_plan(tiny_config(train__steps=1000), inventory(1)).predicted.train_s
    plan = make_plan(tiny_config(train__steps=1000, train__target_minutes=share * in_all_s / 60), inventory(1))
    assert plan.steps == pytest.approx(steps, abs=1)
    assert plan.sequences == 8 * plan.steps
    assert re.match(why.replace(str(steps), f"{plan.steps:,}", 1), plan.reasons[0])


@pytest.mark.parametrize(
    ("packing", "epoch"),
    [
        ("stream", (249, 249 * 16, 0, 0)),
        ("documents", (249, 249 * 16, 0, 0)),
        ("padded", (280, 4000, 40, 40)),
        ("best-fit", (250, 4000, 40, 40)),
    ],
)
def test_an_epoch_is_counted_from_the_shards(packing: Packing, epoch: tuple[int, ...], tiny_shards: Path) -> None:
    """4,000 tokens in 40 documents of 100: 249 windows of 16 and a token to predict, or 7 pieces of each document, of
    which the last, of 4 tokens, goes into a sequence with three others.
    """
    assert one_epoch(tiny_shards, packing=packing, context=16) == (epoch,)


def test_axes_are_ordered_so_that_those_who_talk_most_are_neighbours() -> None:
    plan = make_plan(tiny_config(parallel__tp=2, parallel__pp=2), inventory(4, 4))
    assert list(plan.mesh.items()) == [("pp", 2), ("dp", 2), ("tp", 2)]
    assert plan.dp * plan.micro_batch * plan.accumulation == 8


def test_a_pipeline_gets_micro_batches_to_fill_it() -> None:
    plan = make_plan(tiny_config(parallel__pp=2, train__micro_batch=0), inventory(2))
    assert plan.micro_batch == 4
    assert plan.accumulation == 2


def test_automatic_ranks_leave_whole_replicas_of_the_model() -> None:
    plan = make_plan(tiny_config(parallel__tp=2, train__global_batch=4), inventory(7))
    assert plan.mesh == {"pp": 1, "dp": 2, "tp": 2}
    assert reasons(plan, "3 stay idle")


def test_a_model_without_a_tensor_plan_is_told_which_strategies_it_can_have() -> None:
    config = tiny_config(model__architecture="path", model__path="somewhere", model__dropout=0.0, parallel__tp=2)
    opt = AutoConfig.for_model("opt", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    shape = count_model(opt, objective="causal")
    with pytest.raises(
        ValueError,
        match=r"models of type opt cannot be split by parallel.tp = 2: transformers .*fsdp, zero1, zero2 or",
    ):
        make_plan(config, inventory(2), hf_config=opt.to_dict(), hf_shape=shape)


@pytest.mark.parametrize("packing", ["documents", "best-fit"])
def test_documents_are_kept_apart_only_by_classes_that_can(packing: str) -> None:
    config = tiny_config(
        model__architecture="path", model__path="somewhere", model__dropout=0.0, train__packing=packing
    )
    bloom = AutoConfig.for_model("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=61)
    with pytest.raises(
        ValueError, match=rf"packing={packing} .* models of type bloom cannot: its forward takes no positions"
    ):
        make_plan(config, inventory(2), hf_config=bloom.to_dict(), hf_shape=count_model(bloom, objective="causal"))


def test_a_type_that_nobody_tested_trains_whole_and_is_not_split() -> None:
    llama = AutoConfig.for_model("llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    shape = count_model(llama, objective="causal").model_copy(update={"architecture": "invented"})

    def planned(**asked: Any) -> RunPlan:
        config = tiny_config(model__architecture="path", model__path="somewhere", model__dropout=0.0, **asked)
        return make_plan(config, inventory(2), hf_config={"model_type": "invented"}, hf_shape=shape)

    for axis in ("pp", "tp", "cp"):
        with pytest.raises(
            ValueError, match=rf"models of type invented cannot be split by parallel.{axis} = 2: it is not among"
        ):
            planned(**{f"parallel__{axis}": 2})
    for strategy, ranks in {"single": 1, "ddp": 2, "fsdp": 2, "zero3": 2, "auto": 2}.items():
        plan = planned(parallel__strategy=strategy)
        assert (plan.world_size, plan.mesh["pp"], plan.mesh["tp"]) == (ranks, 1, 1)
