"""A plan for other hosts: the same batches, within what the user said fits, and the old plan where it fits again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.planning.plan import replan, without_compile, write_plan
from tasks.tracking.mlflow_run import TrackedRun
from tests.support.configs import inventory, read_plan, reasons, tiny_config, unlike_hosts
from training.config.train import learning_rate
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.records.token_shards import LeftOut, TokenShards
from training.shards.packing import one_epoch


def planned(
    folder: Path,
    shards: Path,
    *,
    micro_batch: int,
    strategy: str = "ddp",
    global_batch: int = 12,
    hosts: Inventory | None = None,
    **overrides: Any,
) -> RunPlan:
    """On 2 + 1 ranks of two hosts, if they are not given."""
    batch = {"train__global_batch": global_batch, "train__micro_batch": micro_batch}
    config = tiny_config(**batch, parallel__strategy=strategy, **overrides)
    plan = make_plan(
        config,
        hosts or inventory(2, 1),
        run_id=folder.name,
        shards=TokenShards.read(shards / "manifest.json"),
        shards_dir=str(shards),
        epoch=one_epoch(shards, packing=config.train.packing, context=config.train.context),
    )
    plan.write(folder / "plan.json")
    return plan


def test_a_warm_up_that_outlasts_the_run_is_warned_of(
    tiny_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether by train.steps or by the steps that train.target_minutes leaves."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    shards = TokenShards.read(tiny_shards / "manifest.json")
    for name, settings, steps in (
        ("short", {"train__steps": 10, "train__warmup_steps": 100}, 10),
        ("limited", {"train__steps": 500, "train__warmup_steps": 100, "train__target_minutes": 1e-9}, 100),
        ("long", {"train__steps": 101, "train__warmup_steps": 100}, 0),
    ):
        config = tiny_config(train__learning_rate=1e-3, train__min_learning_rate=1e-4, **settings)
        run = TrackedRun(run_id=name, mlflow_run_id="1", experiment_id="1", begun_with=config)
        caplog.clear()
        plan = write_plan(config, run=run, inventory=inventory(1), shards=shards, shards_dir=tiny_shards)
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        if not steps:
            assert not [reason for reason in (*plan.reasons, *warnings) if "warmup_steps" in reason]
            continue
        rate = learning_rate(steps - 1, config.train, steps=plan.steps)
        sentence = (
            f"learning rate: the run ends after {steps} steps, within the 100 of train.warmup_steps, at {rate:.3g}, "
            f"{rate / 1e-3:.0%} of train.learning_rate = 0.001: set train.warmup_steps={steps // 10}, a tenth of the "
            "run, or train for more steps"
        )
        assert sentence in plan.reasons
        assert f"plan: {sentence}" in warnings


def test_what_of_the_corpus_is_not_in_the_tokens_is_said(
    tiny_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    lost = LeftOut(kind=".docx", files=3, num_bytes=5, example="a.docx", why="it is a zip archive")
    shards = TokenShards.read(tiny_shards / "manifest.json").model_copy(
        update={"characters": 1000, "lost_characters": 2, "filtered": 7, "left_out": (lost,)}
    )
    run = TrackedRun(run_id="lossy", mlflow_run_id="1", experiment_id="1", begun_with=tiny_config())
    caplog.set_level("INFO")
    plan = write_plan(tiny_config(), run=run, inventory=inventory(1), shards=shards, shards_dir=tiny_shards)
    levels = {record.getMessage().removeprefix("plan: "): record.levelname for record in caplog.records}
    for words, level in (
        ("left out 7 rows for which data.where is false", "INFO"),
        ("left out 3 files (.docx, 0.0 MB, while ", "WARNING"),  # more than is read, since nothing is listed as read
        ("0.20% of the characters (2 of 1,000) are lost", "WARNING"),
    ):
        (line,) = reasons(plan, words)
        assert levels[line] == level


def first_host() -> Inventory:
    return Inventory(hosts=inventory(2, 1).hosts[:1])


def test_fewer_hosts_make_the_same_batches(tmp_path: Path, tiny_shards: Path) -> None:
    before = planned(tmp_path, tiny_shards, micro_batch=2, train__steps=90, train__target_minutes=0.01)
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert now.steps == before.steps < 90, "steps that fitted the minutes on the hosts there were"
    assert (now.hosts, now.world_size) == (("host0",), 2)
    assert now.batch_tokens == before.batch_tokens
    assert now.config == before.config
    assert now.reasons[-1] == "host1 is away"
    assert read_plan(tmp_path) == now
    assert replan(tmp_path, inventory=inventory(2, 1), why="host1 came back") == before


@pytest.mark.parametrize(("micro_batch", "at_most"), [(1, 1), (4, 4), (0, 12)])
def test_a_micro_batch_never_grows_beyond_what_was_asked_for(
    tmp_path: Path, tiny_shards: Path, micro_batch: int, at_most: int
) -> None:
    planned(tmp_path, tiny_shards, micro_batch=micro_batch)
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert now.micro_batch <= at_most
    assert now.micro_batch * now.accumulation * now.dp == now.config.train.global_batch


def test_fewer_hosts_keep_what_was_chosen_and_more_of_them_are_used(tmp_path: Path, tiny_shards: Path) -> None:
    """Left to the plan: fsdp pinned by what was chosen before, single only for want of a second device."""
    before = planned(tmp_path / "two", tiny_shards, micro_batch=0, strategy="auto")
    kept = before.model_copy(update={"strategy": "fsdp", "activation_checkpointing": "full"})
    kept.write(tmp_path / "two" / "plan.json")
    now = replan(tmp_path / "two", inventory=first_host(), why="host1 is away")
    assert (now.strategy, now.activation_checkpointing, now.config.parallel.strategy) == ("fsdp", "full", "auto")
    alone = planned(tmp_path / "one", tiny_shards, micro_batch=0, strategy="auto", hosts=inventory(1))
    assert alone.strategy == "single"
    assert replan(tmp_path / "one", inventory=inventory(2, 1), why="a host came").world_size == 3


def test_what_no_longer_fits_as_it_was_is_chosen_anew_and_said(tmp_path: Path, tiny_shards: Path) -> None:
    kept = planned(tmp_path, tiny_shards, micro_batch=0, strategy="auto", global_batch=4, hosts=inventory(2, 2))
    kept.model_copy(update={"mesh": {"pp": 1, "dp": 1, "tp": 4}}).write(tmp_path / "plan.json")
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert now.world_size == 2
    assert reasons(now, "the earlier one is not possible here")


def test_other_hosts_get_other_shares_and_those_that_come_back_their_own(tmp_path: Path, tiny_shards: Path) -> None:
    hosts = []
    for host, rate in zip(inventory(2, 1).hosts, (0.08, 0.02), strict=True):
        rates = {"matmul_tflops": {"fp32": rate}, "memory_gb_per_s": 100 * rate}
        devices = tuple(device.model_copy(update=rates) for device in host.devices)
        network = {"network_gb_per_s": 10.0, "network_latency_us": 1.0}  # tiny steps are not to be all talk
        hosts.append(host.model_copy(update={"devices": devices, **network}))
    unlike = Inventory(hosts=tuple(hosts))
    before = planned(tmp_path, tiny_shards, micro_batch=0, global_batch=18, hosts=unlike)
    assert before.micro_batches == (8, 8, 2)
    now = replan(tmp_path, inventory=first_host(), why="host1 is away")
    assert (now.micro_batches, now.rebalance) == ((9, 9), False)
    assert replan(tmp_path, inventory=unlike, why="host1 came back") == before


def test_other_hosts_compute_in_the_precisions_that_their_devices_had(tmp_path: Path, tiny_shards: Path) -> None:
    hosts = unlike_hosts("fast", "slow", "slow")
    table = {"fast": "bf16", "slow": "fp32"}
    before = planned(tmp_path, tiny_shards, micro_batch=0, hosts=hosts, parallel__precision=table)
    assert before.precisions == ("bf16", "fp32", "fp32")
    now = replan(tmp_path, inventory=Inventory(hosts=hosts.hosts[:2]), why="a slow host is away")
    assert (now.precisions, now.precision_by_device) == (("bf16", "fp32"), table)
    now = replan(tmp_path, inventory=Inventory(hosts=hosts.hosts[:1]), why="both are away")
    assert (now.precision, now.precisions) == ("bf16", ())
    new = unlike_hosts("fast", "slow", "new")
    assert planned(tmp_path / "2", tiny_shards, micro_batch=0, hosts=hosts, parallel__precision=table)
    now = replan(tmp_path / "2", inventory=Inventory(hosts=new.hosts[1:]), why="another host came")
    assert (now.precision, now.precisions) == ("fp32", ()), "what all devices supported"
    assert replan(tmp_path, inventory=hosts, why="all came back") == before


def with_compilers(*devices: int, memory_gib: float = 12.0) -> Inventory:
    hosts = inventory(*devices, kind="cuda", memory_gib=memory_gib).hosts
    return Inventory(hosts=tuple(host.model_copy(update={"compile_lacks": ""}) for host in hosts))


def test_layers_that_a_trial_could_not_compile_stay_eager_on_other_hosts(tmp_path: Path, tiny_shards: Path) -> None:
    hosts = with_compilers(2, 1)
    compiled = planned(tmp_path, tiny_shards, micro_batch=0, hosts=hosts, train__steps=10_000_000)
    assert compiled.compiled, "by choice"
    why = "compile off: a trial with it failed"
    eager = without_compile(compiled, inventory=hosts, why=why)
    assert (eager.compiled, eager.strategy, eager.mesh) == (False, compiled.strategy, compiled.mesh)
    assert (eager.config, eager.reasons[-1]) == (compiled.config, why)
    assert not reasons(eager, "compile on")
    eager.write(tmp_path / "plan.json")
    assert not replan(tmp_path, inventory=with_compilers(2), why="host1 is away").compiled


def test_eager_layers_get_the_micro_batch_that_fits_them(tmp_path: Path, tiny_shards: Path) -> None:
    """They keep more than compiled ones."""
    hosts = with_compilers(1, memory_gib=4.0)
    batch = {
        "train__activation_checkpointing": "none",
        "train__context": 256,
        "global_batch": 512,
        "train__steps": 1_000_000,
    }
    settings: dict[str, Any] = {"micro_batch": 0, "hosts": hosts, "model__layers": 24, **batch}
    compiled = planned(tmp_path, tiny_shards, **settings)
    eager = without_compile(compiled, inventory=hosts, why="a trial failed")
    asked = planned(tmp_path, tiny_shards, **settings, train__compile=False)
    assert (compiled.compiled, eager.compiled) == (True, False)
    assert (eager.micro_batch, eager.predicted) == (asked.micro_batch, asked.predicted)
    kept = [each.predicted.memory_gib["activations"] / each.micro_batch for each in (compiled, eager)]
    assert kept[0] < kept[1]


def test_hosts_that_a_plan_leaves_idle_stay_idle(
    tmp_path: Path, tiny_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a resume, in a trial, and when another of its hosts is lost; without any of its own hosts they are used."""
    monkeypatch.setenv("SHARDLINE_HOME", str(tmp_path))
    rates = {"slow": 0.001, "first": 0.08, "second": 0.08}
    hosts = []
    for name, rate in rates.items():
        (host,) = inventory(1).hosts
        device = host.devices[0].model_copy(update={"matmul_tflops": {"fp32": rate}, "memory_gb_per_s": 1000 * rate})
        network = {"network_gb_per_s": 10.0, "network_latency_us": 1.0, "compile_lacks": ""}
        hosts.append(host.model_copy(update={"name": name, "devices": (device,), **network}))
    slow, first, second = hosts
    machines = Inventory(hosts=tuple(hosts))
    before = planned(tmp_path / "run", tiny_shards, micro_batch=0, strategy="auto", global_batch=256, hosts=machines)
    assert (before.hosts, before.idle_hosts) == (("first", "second"), ("slow",))
    again = without_compile(before, inventory=Inventory(hosts=(first, second)), why="a trial failed")
    assert (again.hosts, again.idle_hosts) == (before.hosts, before.idle_hosts)
    assert replan(tmp_path / "run", inventory=machines, why="no change") == before
    now = replan(tmp_path / "run", inventory=Inventory(hosts=(slow, second)), why="first is away")
    assert (now.hosts, now.idle_hosts) == (("second",), ("slow",))
    assert replan(tmp_path / "run", inventory=machines, why="first came back") == before
    alone = replan(tmp_path / "run", inventory=Inventory(hosts=(slow,)), why="only this one is left")
    assert (alone.hosts, alone.idle_hosts) == (("slow",), ())
