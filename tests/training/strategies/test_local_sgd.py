"""Groups that train by themselves and agree seldom make the steps of the published algorithm."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.configs import inventory, reasons, tiny_config
from tests.support.ranks import Ranks, losses, run_ranks
from tests.support.tiny_shards import MakeRun
from tests.training.strategies.test_strategies import LOSS_BOUND, WEIGHT_BOUND, final
from training.config.train import learning_rate
from training.data.held_out import held_out_by_source
from training.data.loader import Loader
from training.models.language_model import build_model
from training.planner.plan import make_plan
from training.records.inventory import Inventory
from training.records.plan import RunPlan
from training.strategies.optim import build_adamw, set_learning_rate
from training.tracking.rows import read_rows

STEPS, EVERY, VALIDATED, GROUPS = 8, 3, 4, 2
SETTINGS: dict[str, Any] = {
    "parallel__strategy": "local-sgd",
    "parallel__outer_every_steps": EVERY,
    "model__dropout": 0.0,
    "train__steps": STEPS,
    "train__clip_norm": 0.5,
    "train__micro_batch": 1,
    "evaluation__every_steps": VALIDATED,
    "checkpoint__every_steps": 7,
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two that wait for each other on a busy machine take a hundred times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Reference:
    """DiLoCo's algorithm 1 on one process, on whole batches; a group's gradient is that of its part of the batch."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan, self.device = plan, torch.device("cpu")
        first = build_model(plan).train()
        self.models = [first, *(copy.deepcopy(first) for _ in range(GROUPS - 1))]
        self.adamws = [build_adamw(model, plan.config.train, fused=True) for model in self.models]
        self.agreed = copy.deepcopy(first)
        parallel = plan.config.parallel
        self.sgd = torch.optim.SGD(
            self.agreed.parameters(),
            lr=parallel.outer_learning_rate,
            momentum=parallel.outer_momentum,
            nesterov=parallel.outer_momentum > 0,
        )
        self.loaders = [Loader(plan, dp_rank=rank, device=self.device) for rank in range(plan.dp)]

    def step(self, step: int) -> float:
        """Mean loss over the groups."""
        total, train = 0.0, self.plan.config.train
        for group, (model, adamw) in enumerate(zip(self.models, self.adamws, strict=True)):
            ranks = self.loaders[group * self.plan.group_ranks : (group + 1) * self.plan.group_ranks]
            for share in (loader.share(step - 1) for loader in ranks):
                for batch in share.batches:
                    loss = model(batch.inputs, batch.targets) / share.num_targets
                    (GROUPS * loss).backward()
                    total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
            set_learning_rate(adamw.param_groups, learning_rate(step - 1, train, steps=self.plan.steps))
            adamw.step()
            adamw.zero_grad()
        if step % EVERY == 0:
            for parameter, mean in zip(self.agreed.parameters(), self.mean().parameters(), strict=True):
                parameter.grad = (parameter - mean).detach()
            self.sgd.step()
            for model in self.models:
                model.load_state_dict(self.agreed.state_dict())
        return total

    @torch.no_grad()
    def mean(self) -> Any:
        mean = copy.deepcopy(self.models[0])
        for parameter, *theirs in zip(mean.parameters(), *(model.parameters() for model in self.models), strict=True):
            parameter.copy_(torch.stack(theirs).mean(0))
        return mean

    @torch.no_grad()
    def validate(self) -> float:
        limit = self.plan.config.evaluation.quick_sequences
        held_out = held_out_by_source(self.plan, rank=0, world_size=1, device=self.device, limit=limit)
        batches = [batch for _, batch in held_out]
        targets = sum(int((batch.targets >= 0).sum()) for batch in batches)
        model = self.mean().eval()
        return sum(model(batch.inputs, batch.targets).item() for batch in batches) / targets


@pytest.fixture(scope="module")
def trained(make_run: MakeRun) -> Callable[..., Path]:
    """The plan of a run in two groups that is done; made once per kind."""
    made: dict[str, Path] = {}

    def run(ranks: int, **overrides: Any) -> Path:
        name = f"groups {ranks} {overrides}"
        if name not in made:
            group = {"parallel__group_ranks": ranks // GROUPS}
            made[name] = make_run(name, ranks=ranks, **SETTINGS, **group, **overrides)
            run_ranks(made[name])
        return made[name]

    return run


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, {}),
        pytest.param(4, {}, marks=pytest.mark.slow),
        pytest.param(
            2, {"parallel__outer_learning_rate": 1.0, "parallel__outer_momentum": 0.0}, marks=pytest.mark.slow
        ),
    ],
    ids=["one rank each", "two ranks each", "plain averages"],
)
def test_groups_make_the_published_steps(ranks: int, overrides: dict[str, Any], trained: Callable[..., Path]) -> None:
    plan_path = trained(ranks, **overrides)
    reference, expected, validations = Reference(RunPlan.read(plan_path)), dict[int, float](), dict[int, float]()
    for step in range(1, STEPS + 1):
        expected[step] = reference.step(step)
        if step % VALIDATED == 0:
            validations[step] = reference.validate()
    assert losses(plan_path) == pytest.approx(expected, rel=LOSS_BOUND * expected[1])
    rows = read_rows(plan_path.parent / "metrics.jsonl")
    validated = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    assert validated == pytest.approx(validations, rel=LOSS_BOUND * expected[1])
    weights = dict(reference.mean().hf.named_parameters())
    got = final(plan_path)
    for name in got:
        assert (got[name] - weights[name]).abs().max() < WEIGHT_BOUND, name


def test_only_outer_steps_cross_the_slow_link(trained: Callable[..., Path]) -> None:
    """Each of two ranks, a group each, sends every fp32 number once, at every third step."""
    plan_path = trained(2)
    sent = {row["step"]: row.get("communication_mib", 0) for row in read_rows(plan_path.parent / "metrics.jsonl")}
    whole = 4 * RunPlan.read(plan_path).shape.parameters / 2**20
    assert [sent[step] for step in range(1, STEPS + 1)] == [whole if step % EVERY == 0 else 0 for step in range(1, 9)]


@pytest.mark.slow
def test_a_resume_with_other_groups_starts_from_the_mean_and_logs_it(make_run: MakeRun) -> None:
    """Four groups of one rank, then one process."""
    groups = make_run("four groups", ranks=4, parallel__group_ranks=1, **SETTINGS)
    run_ranks(groups)
    later = {**SETTINGS, "parallel__strategy": "single", "train__steps": STEPS + 2, "train__micro_batch": 8}
    alone = make_run("one process", **later)
    shutil.copytree(groups.parent / "checkpoints", alone.parent / "checkpoints")
    ranks = Ranks(alone)
    ranks.finish()
    assert "each rank's own state (compression, local-sgd) starts fresh" in ranks.log()
    assert losses(alone)[STEPS + 1] == pytest.approx(losses(groups)[STEPS], abs=0.15)  # after 4.1 at first


@pytest.mark.parametrize(
    ("hosts", "overrides", "message"),
    [
        ((2, 1), {"train__global_batch": 6}, "hosts of 2, 1 ranks and tp = 1 make no equal groups: set parallel.group"),
        ((2, 2), {"parallel__group_ranks": 3}, "4 data-parallel ranks cannot be split into groups of .* = 3"),
        ((2, 2), {"parallel__precision": "fp16"}, "local-sgd lets each group see its own gradient only"),
        ((2, 2), {"parallel__compression": "topk"}, "it can have none, bf16"),
        ((2, 2), {"parallel__strategy": "fsdp", "parallel__group_ranks": 2}, "group_ranks = 2 would not be used"),
        ((2, 2), {"parallel__tp": 2}, "parallel.tp = 2 runs with parallel.strategy=ddp, fsdp, hsdp, zero1, not local"),
    ],
)
def test_impossible_groups_are_refused_with_the_cure(
    hosts: tuple[int, ...], overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(tiny_config(**{"parallel__strategy": "local-sgd", **overrides}), inventory(*hosts))


@pytest.mark.parametrize("strategy", ["hsdp", "local-sgd"])
def test_a_host_is_a_group_unless_the_config_says_otherwise(strategy: str) -> None:
    plan = make_plan(tiny_config(parallel__strategy=strategy), inventory(2, 2))
    assert plan.group_ranks == 2
    assert reasons(plan, "2 groups of 2 data-parallel ranks: one per host")


def test_groups_that_the_plan_chooses_are_hosts() -> None:
    """7B parameters on two hosts of eight GPUs, which a host can hold when it shards them."""
    model = {
        "model__width": 4096,
        "model__layers": 32,
        "model__heads": 32,
        "model__kv_heads": 32,
        "model__dropout": 0.0,
    }
    train = {"train__context": 2048, "train__global_batch": 256, "train__micro_batch": 0}
    machines = inventory(8, 8, kind="cuda", memory_gib=80.0, disk_gib=1e5)
    hosts = [host.model_copy(update={"allreduce_gb_per_s": 300.0, "network_gb_per_s": 3.0}) for host in machines.hosts]
    plan = make_plan(tiny_config(**model, **train, parallel__tp=1, parallel__pp=1), Inventory(hosts=tuple(hosts)))
    assert (plan.strategy, plan.group_ranks) == ("hsdp", 8)


def test_hsdp_needs_the_memory_of_its_group_and_local_sgd_that_of_its_outer_step() -> None:
    parts = {
        name: make_plan(tiny_config(parallel__strategy=name), inventory(2, 2)).predicted.memory_gib
        for name in ("fsdp", "hsdp", "ddp", "local-sgd")
    }
    assert parts["hsdp"]["weights"] == 2 * parts["fsdp"]["weights"]
    assert parts["local-sgd"]["kept from step to step"] == pytest.approx(2 * parts["ddp"]["weights"])
