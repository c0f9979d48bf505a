"""The choice: what is priced, what is pinned, what is left out, and what is said of it."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.support.configs import inventory, reasons, tiny_config, with_hosts
from training.config.run import RunConfig
from training.planner.cluster import Cluster, Ring
from training.planner.hypothetical_hosts import hypothetical_inventory
from training.planner.job import Layout
from training.planner.plan import make_plan
from training.planner.price.pricing import PricedLayout, best_first
from training.planner.reasons.layout import describe_slower
from training.records.inventory import Inventory
from training.records.plan import RunPlan

GPT2 = {"architecture": "gpt2", "layers": 12, "width": 768, "heads": 12}
LLAMA_1B = {"layers": 22, "width": 2048, "heads": 32, "kv_heads": 8, "mlp_width": 5632, "tie_embeddings": False}
LLAMA_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336, "tie_embeddings": False}
LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "mlp_width": 28672, "tie_embeddings": False}


def planned(model: dict[str, Any], machines: str, *, context: int = 4096, batch: int = 512, **parallel: Any) -> RunPlan:
    config = RunConfig.model_validate(
        {
            "model": model,
            "data": {"tokenizer": {"kind": "bpe", "vocab_size": 32_768}},
            "train": {"context": context, "global_batch": batch, "compile": False},
            "parallel": parallel,
        }
    )
    return make_plan(config, hypothetical_inventory(machines))


def test_a_small_model_is_replicated_and_a_large_one_sharded() -> None:
    assert planned(LLAMA_1B, "1x8xH100-80GB-SXM", strategy="ddp").predicted.memory_gib["weights"] > 4
    small = make_plan(tiny_config(train__micro_batch=0), inventory(4, kind="cuda"))
    assert (small.strategy, small.mesh["dp"]) == ("ddp", 4)
    large = planned(LLAMA_8B, "2x8xA100-40GB-SXM,8x200Gb")
    assert large.strategy in {"fsdp", "hsdp", "zero3"}
    assert any(reason.startswith("does not fit: ddp") and "GiB more than" in reason for reason in large.reasons)


def test_what_fits_no_other_way_is_cut_by_tensor_or_pipeline_inside_hosts() -> None:
    plan = planned(LLAMA_70B, "16x8xH100-80GB-SXM,8x400Gb", strategy="ddp", tp=8, pp=8)
    assert plan.mesh == {"pp": 8, "dp": 2, "tp": 8}
    by_itself = planned(LLAMA_70B, "16x8xH100-80GB-SXM,8x400Gb")
    assert by_itself.mesh["tp"] <= 8
    assert sum(by_itself.predicted.memory_gib.values()) < 0.9 * 80


def test_recomputing_and_offload_are_the_last_resorts_and_say_so() -> None:
    plan = planned(LLAMA_8B, "1x8xRTX-4090")
    assert plan.activation_checkpointing != "none"
    (why,) = reasons(plan, "activation checkpointing")
    assert "without it" in why
    alone = planned(LLAMA_8B, "1x1xA100-80GB-SXM", batch=8)
    assert alone.offload != "none"
    assert reasons(alone, f"offload {alone.offload}: nothing fits without it")
    assert planned(LLAMA_1B, "1x1xA100-80GB-SXM", batch=8).offload == "none"


def test_offload_is_taken_where_it_is_faster_and_the_host_has_room() -> None:
    """Small GPUs on PCIe: without it only layouts that talk more fit."""
    plan = planned(LLAMA_8B, "1x8xRTX-4090")
    assert (plan.strategy, plan.mesh["dp"], plan.offload) == ("fsdp", 8, "parameters")
    assert plan.predicted.step_ms < planned(LLAMA_8B, "1x8xRTX-4090", offload="none").predicted.step_ms
    assert reasons(plan, "offload parameters: without it the fastest that fits")
    machines = hypothetical_inventory("1x8xRTX-4090")
    assert make_plan(plan.config, with_hosts(machines, memory_gib=64.0)).offload == "none"


def test_what_a_refusal_counts_adds_up_and_its_cures_help() -> None:
    """8B on one small GPU: offloaded, it lacks host memory; pinned to ddp on eight, another layout would fit."""
    with pytest.raises(ValueError, match="does not fit in the memory of hypothetical-0") as refused:
        planned(LLAMA_8B, "1x1xRTX-4090,64GiB")
    why = str(refused.value)
    assert "zero3" not in why
    assert "train.micro_batch" not in why
    numbers = re.findall(r"([\d.]+) GiB, ([\d.]+) GiB usable \(90% of ([\d.]+)\), ([\d.]+) GiB too few", why)[0]
    needed, usable, memory, missing = map(float, numbers)
    assert (memory, usable) == (64.0, 57.6)
    assert needed - usable == pytest.approx(missing, abs=0.11)
    (wanted,) = re.findall(r"too few: use hosts with (\d+) GiB of memory", why)
    assert planned(LLAMA_8B, f"1x1xRTX-4090,{int(wanted) + 1}GiB").offload == "parameters"
    cure = r"too few: leave the layout to the plan \(.* fits\), or a smaller model"
    with pytest.raises(ValueError, match=cure) as refused:
        planned(LLAMA_8B, "1x8xRTX-4090", strategy="ddp")
    numbers = r"= ([\d.]+) GiB per rank .* \((weights .*?)\), ([\d.]+) GiB usable, ([\d.]+) GiB too"
    ((needed, parts, usable, missing),) = re.findall(numbers, str(refused.value))
    assert sum(float(part.rsplit(" ", 1)[1]) for part in parts.split(", ")) == pytest.approx(float(needed), abs=0.5)
    assert float(needed) - float(usable) == pytest.approx(float(missing), abs=0.11)


def test_a_layout_that_fills_the_memory_is_taken_only_where_nothing_is_near() -> None:
    """8B at 8,192 tokens on 8 H100: one that needs less is as fast within 3%."""
    plan = planned(LLAMA_8B, "1x8xH100-80GB-SXM", context=8192)
    assert sum(plan.predicted.memory_gib.values()) <= 0.9 * plan.ranking[0].usable_gib


def test_weights_stay_gathered_and_gradients_whole_where_that_is_faster_and_fits() -> None:
    """Gathered and reduced once a step instead of in each micro-batch, for 2 and 4 bytes of each parameter."""
    how: dict[str, Any] = {"machines": "2x8xA100-80GB-SXM,8x200Gb", "strategy": "fsdp"}
    plan = planned(LLAMA_1B, **how)
    assert (plan.reshard_after_forward, plan.reduce_gradients) == (False, "last")
    both: dict[str, Any] = {"reshard_after_forward": "on", "reduce_gradients": "each"}
    plain = planned(LLAMA_1B, **how, **both)
    assert (plain.reshard_after_forward, plain.reduce_gradients) == (True, "each")
    assert not any(reason.startswith(tuple(both)) for reason in plain.reasons), "asked for"
    assert plan.predicted.exposed_communication_s < plain.predicted.exposed_communication_s / plain.accumulation * 2
    without = planned(LLAMA_1B, **how, reshard_after_forward="on")
    (why,) = reasons(plan, "reshard_after_forward off: ")
    assert "without it a step is" in why
    assert without.predicted.step_ms > plan.predicted.step_ms
    kept, gathered = (each.predicted.memory_gib["gathered or cast weights"] for each in (plan, plain))
    assert kept - gathered == pytest.approx(6 * plan.shape.parameters / 2**30, rel=0.15)
    large = planned(LLAMA_8B, "1x8xA100-40GB-SXM", strategy="fsdp")
    assert (large.reshard_after_forward, large.reduce_gradients) == (True, "each")
    (why,) = reasons(large, "reduce_gradients each: ")
    assert why.endswith("more than are usable")
    piped = planned(LLAMA_8B, "2x8xA100-80GB-SXM,8x200Gb", strategy="fsdp", pp=2)
    assert (piped.reshard_after_forward, piped.reduce_gradients) == (False, "last"), "as pipelines always do"


@pytest.mark.parametrize("asked", [{"reshard_after_forward": "off"}, {"reduce_gradients": "last"}])
def test_parameters_on_the_host_never_go_with_what_keeps_them_whole(asked: dict[str, Any]) -> None:
    """By itself the plan puts parameters on the host here, which config refuses beside these fields."""
    assert planned(LLAMA_8B, "1x8xRTX-4090").offload == "parameters"
    plan = planned(LLAMA_8B, "1x8xRTX-4090", **asked)
    assert plan.offload != "parameters"
    (field, value), *_ = asked.items()
    why = f"{field} {value}: has no effect, because {plan.strategy} in {plan.mesh['pp']} pipeline stages was chosen"
    assert reasons(plan, why)
    assert planned(LLAMA_8B, "1x8xRTX-4090", **plan.chosen["parallel"]).mesh == plan.mesh


def test_layers_of_torchao_are_not_cut_by_tensor() -> None:
    def tp_by(fp8_by: str) -> int:
        train = {"context": 4096, "global_batch": 8, "compile": True}
        parallel = {"precision": "fp8", "fp8_by": fp8_by}
        config = RunConfig.model_validate({"model": LLAMA_70B, "train": train, "parallel": parallel})
        return make_plan(config, hypothetical_inventory("4x8xH100-80GB-SXM,8x400Gb")).mesh["tp"]

    assert tp_by("shardline") > 1
    assert tp_by("torchao") == 1


def test_what_was_chosen_of_shards_is_chosen_again() -> None:
    for parallel in ({"strategy": "fsdp"}, {"strategy": "ddp"}, {"strategy": "fsdp", "pp": 2}):
        plan = planned(LLAMA_1B, "1x8xA100-80GB-SXM", **parallel)
        again = planned(LLAMA_1B, "1x8xA100-80GB-SXM", **plan.chosen["parallel"])
        fields = ("strategy", "mesh", "reshard_after_forward", "reduce_gradients")
        assert all(getattr(again, field) == getattr(plan, field) for field in fields)


def test_on_gpus_zero3_is_tried_where_no_fsdp_fits() -> None:
    plan = planned(LLAMA_8B, "1x8xA100-80GB-SXM")
    assert plan.strategy == "fsdp"
    assert "zero3" not in {each.strategy for each in plan.ranking}
    assert reasons(plan, "zero3: not tried, since fsdp fits")
    asked = planned(LLAMA_8B, "1x8xA100-80GB-SXM", strategy="zero3")
    assert asked.strategy == "zero3"
    assert not reasons(asked, "zero3: not tried")


def test_deepspeed_reduces_beside_the_backward_pass_on_gpus() -> None:
    """As DDP does."""
    ddp, zero = (planned(LLAMA_1B, "1x8xA100-80GB-SXM", strategy=strategy) for strategy in ("ddp", "zero1"))
    assert zero.predicted.step_s["dp exposed"] == pytest.approx(ddp.predicted.step_s["dp exposed"], rel=0.05)


@pytest.mark.parametrize(
    ("steps", "lacks", "why"),
    [
        (1000, "", "compile on: a step is predicted to take "),
        (2, "", "compile off: it would save "),
        (1000, "there is no g++", "compile off: on hypothetical-0 there is no g++"),
    ],
)
def test_layers_are_compiled_where_hosts_can_and_it_pays(steps: int, lacks: str, why: str) -> None:
    machines = with_hosts(hypothetical_inventory("1x8xA100-80GB-SXM"), compile_lacks=lacks)
    train = {"context": 4096, "global_batch": 512, "steps": steps, "warmup_steps": 1}
    plan = make_plan(RunConfig.model_validate({"model": LLAMA_1B, "train": train}), machines)
    assert plan.compiled == why.startswith("compile on")
    (reason,) = reasons(plan, why)
    assert not re.search(r"\d,\d{3} s", reason), "long times are hours or days"
    asked = RunConfig.model_validate({"model": LLAMA_1B, "train": train | {"compile": True}})
    assert make_plan(asked, machines).compiled


@pytest.mark.parametrize(("kind", "compiled"), [("qwen3", True), ("gemma3_text", True), ("unheard_of", False)])
def test_layers_are_compiled_of_types_that_the_admission_test_saw_compile(kind: str, compiled: bool) -> None:
    machines = with_hosts(hypothetical_inventory("1x8xA100-80GB-SXM"), compile_lacks="")
    train = {"context": 4096, "global_batch": 512, "steps": 1000}
    config = RunConfig.model_validate(
        {"model": {"architecture": "path", "path": "folder", "dropout": 0}, "train": train}
    )
    shape = planned(LLAMA_1B, "1x8xA100-80GB-SXM").shape.model_copy(update={"architecture": kind})
    content = {"model_type": kind, "vocab_size": shape.vocab_size}
    plan = make_plan(config, machines, hf_config=content, hf_shape=shape)
    assert plan.compiled == compiled
    why = (
        "compile on: " if compiled else f"compile off: layers of type {kind} were not seen to compile: it is not among"
    )
    assert reasons(plan, why)


def test_the_runner_up_and_its_distance_are_named() -> None:
    plan = planned(LLAMA_8B, "1x8xH100-80GB-SXM")
    first, second = plan.ranking[0], plan.ranking[1]
    assert (first.strategy, first.micro_batch) == (plan.strategy, plan.micro_batch)
    assert first.tokens_per_s == pytest.approx(plan.predicted.tokens_per_s)
    assert second.tokens_per_s is not None
    (why,) = reasons(plan, "strategy ")
    assert second.strategy in why
    assert first.tokens_per_s is not None
    slower = first.tokens_per_s / second.tokens_per_s - 1
    assert f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}" in why
    assert any(layout.why_not.endswith("GiB too few") for layout in plan.ranking)


def test_a_layout_that_is_as_fast_is_not_called_slower() -> None:
    assert [describe_slower(share) for share in (-0.01, 0.0004, 0.0006)] == 2 * ["predicted as fast"] + ["0.1% slower"]


def test_sharding_what_every_device_could_hold_has_its_reason() -> None:
    """Ours carries bf16 between layers under fsdp alone; in fp32 nothing is gained, and the simpler one is taken."""
    how: dict[str, Any] = {"machines": "1x8xA100-80GB-SXM", "context": 1024}
    plan, ddp = planned(GPT2, **how), planned(GPT2, **how, strategy="ddp")
    assert plan.strategy == "fsdp"
    (why,) = reasons(plan, "keeps hidden states in bf16")
    own, other = (1000 * each.predicted.step_s["memory-bound"] for each in (plan, ddp))
    assert why.endswith(f"take {own:,.0f} ms of a step instead of {other:,.0f}")
    fp32 = planned(GPT2, **how, precision="fp32")
    assert not reasons(fp32, "hidden states in bf16")


def test_of_those_that_cannot_be_told_apart_the_one_with_most_memory_to_spare_is_taken() -> None:
    cluster = Cluster("cuda", (8,), 80, 300, 2000, Ring(240, 20), Ring(100, 50))

    def priced(step_s: float, gib: float, *, tp: int = 1) -> PricedLayout:
        layout = Layout("ddp", tp, 1, 8 // tp, 1, 1)
        return PricedLayout(layout, cluster, {"weights": gib}, 72, {"products": step_s})

    fastest, sparing, divided, slow = priced(1, 60), priced(1.004, 50), priced(1.003, 50, tp=2), priced(1.019, 10)
    assert best_first([slow, divided, sparing, fastest])[0] is sparing
    assert best_first([slow, fastest])[0] is fastest
    nearly_full, slower = priced(0.99, 70), priced(1.03, 10)
    assert best_first([nearly_full, fastest])[0] is fastest
    assert best_first([nearly_full, slower])[0] is nearly_full


@pytest.mark.parametrize(
    "pinned",
    [
        {"strategy": "zero2"},
        {"strategy": "fsdp", "tp": 2},
        {"tp": 4},
        {"pp": 2},
        {"offload": "parameters"},
        {"strategy": "ddp", "tp": 2, "pp": 4},
    ],
)
def test_every_choice_can_be_pinned(pinned: dict[str, Any]) -> None:
    plan = planned(LLAMA_1B, "2x8xA100-80GB-SXM,8x200Gb", **pinned)
    chosen = {"strategy": plan.strategy, "offload": plan.offload, "tp": plan.mesh["tp"], "pp": plan.mesh["pp"]}
    assert pinned.items() <= chosen.items()
    assert {layout.strategy for layout in plan.ranking} == {plan.strategy} or "strategy" not in pinned


def test_the_arithmetic_adds_up() -> None:
    plan = planned(LLAMA_1B, "2x8xA100-80GB-SXM,8x200Gb")
    predicted = plan.predicted
    step_s = sum(predicted.step_s.values())
    assert predicted.tokens_per_s == pytest.approx(plan.batch_tokens / step_s)
    exposed = sum(each for part, each in predicted.step_s.items() if part.startswith("dp exposed"))
    assert predicted.exposed_communication_s == pytest.approx(exposed)
    assert predicted.train_s == pytest.approx(plan.steps * step_s)
    rate = predicted.tokens_per_s * predicted.flops_per_token
    assert predicted.matmul_share == pytest.approx(rate / (predicted.peak_tflops * 1e12 * plan.world_size))
    assert predicted.mfu == pytest.approx(rate / (312e12 * plan.world_size)), "of the datasheet's bf16"
    assert predicted.mfu < predicted.matmul_share


def test_interleaved_stages_are_tried_where_a_pipeline_would_idle() -> None:
    """405B on 1,024 H100, with 1,024 sequences a step; what was chosen can be pinned, and so can one stage a rank."""
    model = {**LLAMA_70B, "layers": 126, "width": 16384, "heads": 128, "mlp_width": 53248}
    how: dict[str, Any] = {"machines": "128x8xH100-80GB-SXM,8x400Gb", "batch": 1024}
    plan = planned(model, **how)
    assert plan.mesh["pp"] * plan.stages_per_rank > plan.mesh["pp"] > 1
    assert len(plan.replica_layers(0)) == plan.mesh["pp"] * plan.stages_per_rank
    again = planned(model, **how, **plan.chosen["parallel"])
    assert (again.mesh, again.stages_per_rank) == (plan.mesh, plan.stages_per_rank)
    plain = planned(model, **how, pp_stages_per_rank=1)
    assert plain.stages_per_rank == 1
    assert plain.predicted.step_ms > plan.predicted.step_ms


def test_a_slow_network_costs_those_who_talk_over_it() -> None:
    networks = ("8x200Gb", "1Gb")
    fast, slow = (planned(LLAMA_1B, f"2x8xA100-80GB-SXM,{network}", strategy="fsdp") for network in networks)
    assert slow.predicted.tokens_per_s < 0.5 * fast.predicted.tokens_per_s
    assert slow.predicted.exposed_communication_s > 10 * fast.predicted.exposed_communication_s


def test_sixteen_hosts_are_searched_in_well_under_a_second() -> None:
    def seconds() -> float:
        began = time.process_time()
        planned(LLAMA_70B, "16x8xH100-80GB-SXM,8x400Gb", batch=2048)
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 1, "0.3 s; a collection of the tests' garbage may take more"


def test_what_was_not_measured_is_assumed_and_said() -> None:
    unmeasured: Inventory = inventory(4, 4, kind="cuda")
    plan = make_plan(tiny_config(), unmeasured)
    (why,) = reasons(plan, "not measured, assumed")
    assert "GB/s between hosts" in why
    assert "matrix products" not in why


def test_hosts_behind_a_slow_network_are_left_idle_and_what_sends_less_is_named() -> None:
    slow, fast = "2x8xA100-80GB-SXM,1Gb", "2x8xA100-80GB-SXM,200Gb"
    plan, alone = planned(LLAMA_1B, slow), planned(LLAMA_1B, "1x8xA100-80GB-SXM")
    assert (plan.hosts, plan.idle_hosts) == (("hypothetical-0",), ("hypothetical-1",))
    assert plan.predicted.step_ms == alone.predicted.step_ms
    (why,) = reasons(plan, "hosts: 1 of 2 (8 A100-80GB-SXM) make")
    assert why.endswith(": taken; idle: hypothetical-1")
    (why,) = reasons(plan, "all hosts would make, sending less:")
    assert "parallel.strategy=local-sgd" in why
    assert "compression=powersgd" in why
    assert planned(LLAMA_1B, fast).idle_hosts == ()
    asked = planned(LLAMA_1B, slow, strategy="ddp")
    assert asked.idle_hosts == ()
    assert reasons(asked, "parallel.ranks=8 would take them")


@pytest.mark.parametrize(
    ("fast", "slow", "network", "is_taken"),
    [
        ("8xH100-80GB-SXM", "8xV100-32GB-SXM", "25Gb", False),
        ("4xA100-80GB-SXM", "4xRTX-3090", "10Gb", False),
        ("4xA100-80GB-SXM", "4xRTX-3090", "400Gb", True),
    ],
)
@pytest.mark.parametrize("is_slow_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_unlike_hosts_take_part_only_where_they_add_speed(
    fast: str, slow: str, network: str, is_taken: bool, is_slow_first: bool
) -> None:
    """Both figures are said, whichever wins; the machine alone is planned as it would be without the others."""
    hosts = [f"1x{each},{network}" for each in ([slow, fast] if is_slow_first else [fast, slow])]
    plan, alone = planned(LLAMA_1B, "+".join(hosts)), planned(LLAMA_1B, f"1x{fast}")
    speeds = [f"{each.predicted.tokens_per_s:,.0f} tokens/s" for each in (plan, alone)]
    (why,) = reasons(plan, "hosts: ")
    assert all(speed in why for speed in speeds)
    assert plan.predicted.tokens_per_s >= alone.predicted.tokens_per_s
    names = (f"hypothetical-{int(is_slow_first)}", f"hypothetical-{int(not is_slow_first)}")
    assert (set(plan.hosts), plan.idle_hosts) == ((set(names), ()) if is_taken else ({names[0]}, names[1:]))
    if not is_taken:
        assert f"idle: {names[1]}" in why
        assert (plan.describe_precision, plan.mesh) == (alone.describe_precision, alone.mesh)


def test_a_hundred_thousand_gpus_are_a_few_unlike_ones() -> None:
    """This takes 0.4 s; work for each pair of devices, as there once was, would take a day."""
    plan = planned(LLAMA_1B, "12500x8xH100-80GB-SXM,8x400Gb", batch=100_000)
    assert (sum(plan.ranks_per_host), plan.mesh["dp"] * plan.mesh["pp"] * plan.mesh["tp"]) == (100_000, 100_000)
    assert len(set(plan.micro_batches)) == 1


def test_ranks_share_a_sequence_only_where_no_whole_one_fits() -> None:
    """Of 131,072 tokens tp ranks have pieces between blocks; of a million all ranks of the host, throughout."""
    whole = planned(LLAMA_8B, "1x8xH100-80GB-SXM", context=131_072, batch=8)
    assert "cp" not in whole.mesh
    assert whole.mesh["tp"] > 1
    assert whole.sequence_parallel
    pinned: dict[str, Any] = {"strategy": "fsdp", "tp": 2}
    pieces, without = (
        planned(LLAMA_8B, "1x8xH100-80GB-SXM", context=131_072, batch=8, **pinned, sequence_parallel=asked)
        for asked in ("on", "off")
    )
    assert without.predicted.step_ms > pieces.predicted.step_ms
    assert sum(without.predicted.memory_gib.values()) > sum(pieces.predicted.memory_gib.values())
    shared = planned(LLAMA_8B, "1x8xH100-80GB-SXM", context=1_000_000, batch=8)
    assert shared.mesh["cp"] == 8
    assert reasons(shared, "no layout of whole sequences of 1,000,000 tokens fits")
    with pytest.raises(ValueError, match="does not fit"):
        planned(LLAMA_8B, "1x8xH100-80GB-SXM", context=1_000_000, batch=8, cp=1)
