"""Memory and time by published formulas: the numbers of the papers come out, and parts move as they must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.planner_vs_published import MEGATRON, compared, markdown, own_rows, shape_of, summary
from benchmarks.support.published import models, rows
from benchmarks.support.rows_as_planned import coverage_of_families, derived_ranges
from tests.support.configs import inventory, tiny_config
from tests.support.repository import REPO
from training.models.family import layers_of
from training.models.language_model import build_model
from training.planner.cluster import Cluster, Ring, cluster_of
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Job, Layout
from training.planner.plan import make_plan
from training.planner.price.cost_model import our_cost_model
from training.planner.price.memory import activation_bytes_per_token, memory_gib
from training.planner.price.pricing import LIKELY_ON_GPUS, our_step
from training.planner.price.step import Step, rank_parameters, stage_parameters
from training.planner.price.step_time import step_s
from training.records.model_sizes import Part
from training.strategies.tensor import shard_matrices

GPT3 = Job(shape=shape_of("gpt-175b", models()["gpt-175b"], 2048), context=2048, global_batch=64, precision="bf16")
ONE = Layout("ddp", tp=1, pp=1, dp=1, micro_batch=1, accumulation=64)
HOST = cluster_of(inventory(8, kind="cuda"), [8], precision="bf16")


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "coefficient"),
    [
        (1, False, "none", 34 + 5 * 96 * 2048 / 12288),  # eq. 1: sbh (34 + 5 as/h)
        (8, False, "none", 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8)),  # eq. 2
        (8, True, "none", 34 / 8 + 5 * 96 * 2048 / (12288 * 8)),  # eq. 4
        (8, False, "selective", 10 + 24 / 8),  # table 2
        (8, True, "selective", 34 / 8),  # eq. 6
        (8, False, "full", 2),  # table 2
    ],
)
def test_activations_of_gpt3_by_korthikanti(
    tp: int, sequence_parallel: bool, recompute: Any, coefficient: float
) -> None:
    model = MEGATRON.replaced(sequence_parallel=sequence_parallel)
    kept = activation_bytes_per_token(Step(GPT3, replace(ONE, tp=tp, recompute=recompute), model, HOST))
    assert kept == pytest.approx(coefficient * 12288, rel=1e-3)


def test_states_of_a_7_5b_model_by_zero() -> None:
    """Rajbhandari et al. 2020, table 1: 120 GB, and on 64 ranks 31.4, 16.6 and 1.88 GB, at 16 bytes a parameter."""
    shape = shape_of("gpt-7.5b", models()["gpt-7.5b"], 2048)
    rest = Part(parameters=7_500_000_000 - shape.parameters)
    shape = shape.model_copy(update={"sizes": shape.sizes.model_copy(update={"after": rest})})
    assert shape.parameters == pytest.approx(7.5e9, rel=1e-5)
    job = Job(shape=shape, context=2048, global_batch=64, precision="bf16")
    for strategy, gigabytes in {"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.88}.items():
        parts = memory_gib(Step(job, replace(ONE, strategy=strategy, dp=64), MEGATRON, HOST, 64))
        states = sum(parts[part] for part in ("weights", "gradients", "optimizer"))
        assert states * 2**30 / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("tp", "cp", "residual"), [(1, 1, "fp32"), (2, 1, "fp32"), (1, 2, "fp32"), (1, 1, "bf16"), (2, 1, "bf16")]
)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_what_our_layers_keep_is_what_torch_saves(
    architecture: str, tp: int, cp: int, residual: Literal["fp32", "bf16"], fake_ranks: DeviceMesh
) -> None:
    """On tp ranks with sequence parallelism; on ranks that share each sequence; in bf16 from layer to layer."""
    config = tiny_config(
        model__architecture=architecture,
        model__width=128,
        model__heads=4,
        model__kv_heads=2 if architecture == "llama" else 0,
        model__mlp_width=320,
        model__dropout=0.0,
        train__context=64,
        train__residual=residual,
        parallel__precision=residual,
    )
    plan = make_plan(config, inventory(1))
    model = build_model(plan)
    if residual == "bf16":
        model.carry_bf16()
    if tp > 1:
        shard_matrices(model, fake_ranks, sequence_parallel=True)
    if cp > 1:
        model.share_context(fake_ranks.get_group())
    layer, saved, weights = layers_of(model.hf)[1], dict[int, int](), {p.data_ptr() for p in model.parameters()}
    casts = {shape for p in layer.parameters() if p.ndim == 2 for shape in (p.shape, p.t().shape)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if recording and tensor.data_ptr() not in weights and not (residual == "bf16" and tensor.shape in casts):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    recording = False

    def switch(on: bool) -> None:
        nonlocal recording
        recording = on

    layer.register_forward_pre_hook(lambda *_: switch(True))
    layer.register_forward_hook(lambda *_: switch(False))
    ids = torch.zeros(4, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, ids)
    job = Job(shape=plan.shape, context=64, global_batch=4, precision=residual)
    layout = replace(ONE, tp=tp, cp=cp, sequence_parallel=tp > 1)
    step = Step(job, layout, our_cost_model(config, job, layout, "cpu"), HOST)
    expected = activation_bytes_per_token(step) * ids.numel() / cp
    assert sum(saved.values()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("more", "in_chunks"),
    [
        ({"architecture": "qwen3"}, True),  # its layers and ends were found
        ({"architecture": "qwen3_moe", "adds_loss": True}, False),  # beside cross-entropy: its class's own forward
        ({"architecture": "xlnet"}, False),  # its layers are no chain
        ({"architecture": "a_type_of_tomorrow"}, False),
    ],
)
def test_logits_are_whole_where_the_class_runs_whole(more: dict[str, Any], in_chunks: bool) -> None:
    """64 sequences of 2,048 tokens have 25 GiB of logits in fp32, which the loss in chunks never has at one time."""
    given = ({"architecture": "llama", "tied": False}, more | {"tied": False})
    jobs = [replace(GPT3, shape=GPT3.shape.model_copy(update=each)) for each in given]
    fsdp = replace(ONE, strategy="fsdp", dp=8, micro_batch=64)
    llama, other = (memory_gib(our_step(tiny_config(), job, fsdp, HOST)) for job in jobs)
    assert (other == llama) == in_chunks
    assert (other["logits"] < 25) == in_chunks


@pytest.mark.parametrize(("architecture", "share"), [("modernbert", 1.0), ("qwen3", 0.5)])
def test_attention_that_sees_both_sides_has_twice_the_products(architecture: str, share: float) -> None:
    """A GPU computes only what a causal mask leaves."""
    found = cluster_of(inventory(1, kind="cuda"), [1], precision="bf16")
    types = ("bert", architecture)
    jobs = [replace(GPT3, shape=GPT3.shape.model_copy(update={"architecture": each})) for each in types]
    bert, other = (step_s(our_step(tiny_config(), job, ONE, found))["attention"] for job in jobs)
    assert other == pytest.approx(share * bert)


def test_a_pipeline_holds_as_many_micro_batches_as_stages_and_pays_a_bubble() -> None:
    found = cluster_of(hypothetical_inventory("8x8xA100-80GB-SXM,8x200Gb"), [8] * 8, precision="bf16")
    layout = replace(ONE, tp=8, pp=8, recompute="selective")
    flat = replace(layout, pp=1)
    model = MEGATRON.replaced(logit_bytes=0)
    staged, whole = (memory_gib(Step(GPT3, each, model, found))["activations"] for each in (layout, flat))
    assert staged == pytest.approx(whole, rel=0.02)
    seconds = step_s(Step(GPT3, layout, model, found))
    working = sum(seconds.values()) - seconds["pipeline bubble"] - seconds["pp exposed"] - seconds["optimizer"]
    assert seconds["pipeline bubble"] / working == pytest.approx(7 / 64, rel=0.05), "the last stage has the output too"
    interleaved = step_s(Step(GPT3, replace(layout, stages_per_rank=3), model, found))
    assert interleaved["pipeline bubble"] == pytest.approx(seconds["pipeline bubble"] / 3, rel=0.01)


def test_stages_hold_the_whole_model_once_and_a_tied_embedding_twice() -> None:
    job = replace(GPT3, shape=GPT3.shape.model_copy(update={"layers": 96}))
    stages = [rank_parameters(job, replace(ONE, pp=8), stage) for stage in range(8)]
    words = job.shape.vocab_size * job.shape.width
    assert sum(stages) == job.shape.parameters + words
    assert stage_parameters(job, replace(ONE, pp=8)) == stages[0] == max(stages)


def test_rings() -> None:
    ring = Ring(gb_per_s=100, latency_us=10)
    assert ring.all_reduce_s(1e9, 4) == pytest.approx(2 * 3 / 4 * 0.01 + 1e-5)
    assert ring.gather_s(1e9, 4) == pytest.approx(ring.all_reduce_s(1e9, 4) / 2)
    assert ring.all_reduce_s(1e9, 1) == 0


def test_gathers_pass_all_ranks_of_a_group() -> None:
    """NCCL has trees for all-reduces only. 512 ranks on 64 hosts: 448 hops in hosts, 63 between them."""
    found = Cluster("cuda", (8,) * 64, 80, 300, 2000, Ring(240, 20), Ring(100, 50))
    assert found.link(512).gather_s(0, 512) == pytest.approx((8.4 + 448 * 3.4 + 63 * 14.0) / 1e6)
    assert found.link(64, stride=8).gather_s(0, 64) == pytest.approx((8.4 + 63 * 14.0) / 1e6)
    assert found.link(8).gather_s(0, 8) == pytest.approx((8.4 + 7 * 3.4) / 1e6)
    large, link = 1e11, found.link(8)
    assert link.gather_s(large, 8) == pytest.approx(7 / 8 * large / 240e9, rel=1e-3), "with all of the bandwidth"
    gloo = Cluster("cpu", (8,) * 64, 80, 300, 2000, Ring(240, 20), Ring(100, 50))
    assert gloo.link(512).gather_s(0, 512) == pytest.approx(25e-6)


def test_groups_that_talk_at_once_share_their_hosts_network() -> None:
    found = Cluster("cuda", (8, 8), 80, 300, 2000, Ring(240, 20), Ring(100, 50))
    assert found.link(8).gb_per_s == 240
    assert found.link(16).gb_per_s == 100
    assert found.link(2, stride=8).gb_per_s == 100 / 8
    assert found.link(8, stride=2).gb_per_s == 50


@pytest.mark.parametrize(("strategy", "tp", "messages"), [("ddp", 1, 1), ("fsdp", 1, 2), ("ddp", 8, 2)])
def test_muon_is_priced(strategy: Any, tp: int, messages: int) -> None:
    """It keeps 4 bytes less of each parameter in layers; 8 or 64 ranks share 5 width / tokens of a step's products."""
    found = cluster_of(hypothetical_inventory("8x8xA100-80GB-SXM,8x200Gb"), [8] * 8, precision="bf16")
    layout = replace(ONE, strategy=strategy, tp=tp, dp=8)
    shards = 8 if strategy == "fsdp" else 1
    steps = [our_step(tiny_config(train__optimizer=each), GPT3, layout, found) for each in ("adamw", "muon")]
    kept = [memory_gib(replace(each, num_shards=shards))["optimizer"] for each in steps]
    hidden = GPT3.hidden_of_rank([96], range(1), tp=tp)
    assert hidden / stage_parameters(GPT3, layout) > 0.99
    assert (kept[0] - kept[1]) * 2**30 == pytest.approx(4 * hidden / shards, rel=1e-6)
    before, after = map(step_s, steps)
    tokens = 8 * layout.accumulation * GPT3.context
    assert after["Muon's products"] / before["products"] == pytest.approx(5 * 12288 / tokens, rel=0.35)
    own = hidden / (8 if strategy == "fsdp" else 1)
    sent = messages * found.link(8 * tp).gather_s(2 * own, 8 * tp)
    assert after["Muon exposed"] == pytest.approx(sent)
    assert not {"Muon's products", "Muon exposed"} & before.keys()


def test_published_rows_come_out() -> None:
    """On the rows that no efficiency was fitted to."""
    found = summary([compared(row) for row in rows()])
    assert found["median_throughput_error"] < 0.08
    assert found["p90_throughput_error"] < 0.20
    assert found["median_memory_error"] < 0.10


def test_ranges_are_those_of_published_rows_and_hold_four_of_five_of_families_left_out() -> None:
    planned = own_rows()
    derived = {what: (round(least, 2), round(most, 2)) for what, (least, most) in derived_ranges(planned).items()}
    assert derived == LIKELY_ON_GPUS
    assert all(0.75 <= held <= 0.90 for held in coverage_of_families(planned).values())
    assert markdown() in (REPO / "docs" / "plan-accuracy.md").read_text(), "made by planner_vs_published --table"
