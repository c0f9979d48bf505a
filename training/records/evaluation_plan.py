"""The plan that the ranks of an evaluation read: which model, on which text, and how they share both."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from training.facts.strategies import STRATEGIES, StrategyName
from training.records.checkpoint import averaged_checkpoints
from training.records.plan import RankPlan, RunPlan
from training.records.record import DamagedRecord, OtherFormat
from training.records.train_result import TrainResult


class EvaluationPlan(RankPlan):
    """SHARDLINE_HOME/evaluations/ID/plan.json: the model to measure, the text, and how ranks share both."""

    model: str
    """Folder of the model in Hugging Face layout, absolute or relative to the plan's folder."""
    step: int
    """Step of the checkpoint to measure; 0 for a model that is no checkpoint of a run."""
    checkpoint_sha256: str
    """SHA-256 that identifies the weights: that of the checkpoint's manifest, where it is one."""
    strategy: StrategyName = "single"
    """How ranks share the weights: whole copies (single), or shards (fsdp) where training had shards."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lies in host memory instead of GPU memory."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Always none, because an evaluation has no backward pass."""
    averaged: tuple[str, ...] = ()
    """Folders of the checkpoints whose average is measured beside the model, oldest first; empty for none."""
    accumulation: int = 1
    """Micro-batches of an optimizer step in the run's plan, or 1; an evaluation takes no steps."""
    rebalance: bool = False
    """Always False, because an evaluation keeps its micro-batches."""

    @classmethod
    def of_run(cls, plan: RunPlan, trained: TrainResult) -> Self:
        """The run's last checkpoint on its own held-out text, sharded if training sharded the model.

        Without gradients no rank needs others for its sequences: what were cp peers take sequences of their own.
        """
        # weights are sharded where a rank cannot hold the model whole
        is_sharded = plan.gradient_ranks > 1 and STRATEGIES[plan.strategy].stage == 3
        shared: dict[str, Any] = {name: getattr(plan, name) for name in RankPlan.model_fields}
        changed: dict[str, Any] = {
            "compiled": False,
            "strategy": "fsdp" if is_sharded else "single",
            "offload": plan.offload if is_sharded and plan.offload == "parameters" else "none",
            "activation_checkpointing": "none",
            "mesh": {"pp": plan.mesh["pp"], "dp": plan.gradient_ranks, "tp": plan.mesh["tp"]},
            "micro_batches": tuple(size for size in plan.micro_batches for _ in range(plan.cp)),
            "rebalance": False,
            "sequence_parallel": False,  # texts are of any length
            "reshard_after_forward": True,
            "precisions": (),
            "model": trained.checkpoint,
            "step": trained.step,
            "checkpoint_sha256": trained.checkpoint_sha256,
        }
        return cls(**shared | changed)

    def on_ranks(self, world_size: int) -> Self:
        """This plan; for another number of ranks, one that gives each a whole copy of the model."""
        if world_size == self.world_size:
            return self
        return self.model_copy(
            update={
                "mesh": {"pp": 1, "dp": world_size, "tp": 1},
                "stages": (),
                "ranks_per_host": (world_size,),
                "strategy": "single",
                "offload": "none",
                "micro_batches": (min(self.micro_batches),) * world_size,
            }
        )


def read_evaluation_plan(path: Path) -> EvaluationPlan:
    """An evaluation's plan.json as it is; from a trained run's plan.json, the evaluation of its last checkpoint."""
    result = path.with_name("result.json")
    if result.exists():
        plan, trained = RunPlan.read(path), TrainResult.read(result)
        averaged = averaged_checkpoints(path.parent, plan.config, last_step=trained.step)
        return EvaluationPlan.of_run(plan, trained).model_copy(update={"averaged": tuple(map(str, averaged))})
    try:
        return EvaluationPlan.read(path)
    except OtherFormat:
        raise
    except DamagedRecord:
        raise ValueError(f"{path} is no evaluation's plan, nor a trained run's: there is no {result}") from None
