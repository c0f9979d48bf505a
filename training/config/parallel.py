"""The parallel section of the config: how ranks share a model, a batch and its gradients, and in which precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training.config.section import Section

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "local-sgd", "zero1", "zero2", "zero3"]
# What goes with what: the config refuses the rest, and the plan chooses among these.
WITH_TP = ("ddp", "fsdp", "hsdp")
WITH_PP = ("ddp",)
OFFLOADS: dict[str, tuple[str, ...]] = {
    "zero1": ("optimizer",),
    "zero2": ("optimizer",),
    "zero3": ("optimizer", "parameters"),
    "fsdp": ("parameters",),
    "hsdp": ("parameters",),
}
COMPRESSIONS: dict[str, tuple[str, ...]] = {"ddp": ("bf16", "topk", "powersgd"), "local-sgd": ("bf16",)}
IN_GROUPS = ("hsdp", "local-sgd")


class ParallelConfig(Section):
    strategy: Literal["auto", StrategyName] = Field(
        "auto",
        description="How data-parallel ranks share weights, gradients and optimizer: one process, DDP (each has all), "
        "FSDP2 (each has a shard), or DeepSpeed ZeRO stage 1, 2, 3; or in groups of ranks: hsdp is FSDP2 in groups "
        "that hold the same, local-sgd is DDP in groups that seldom agree (DiLoCo). auto: the fastest that fits, by "
        "the plan.",
    )
    tp: int = Field(
        0,
        ge=0,
        le=1024,
        description="Tensor parallelism: ranks that share each layer's matrices; 0: by the plan (1 if a strategy is "
        "set).",
    )
    pp: int = Field(
        0,
        ge=0,
        le=1024,
        description="Pipeline parallelism: stages that the layers are dealt to; 0: by the plan (1 if a strategy is "
        "set).",
    )
    pp_stages_per_rank: int = Field(
        1, ge=1, le=64, description="Pipeline stages on each rank: 1 runs 1F1B, more run interleaved 1F1B."
    )
    offload: Literal["auto", "none", "optimizer", "parameters"] = Field(
        "auto",
        description="Keep in host memory: optimizer state (zero1-3), or weights and optimizer state (zero3, fsdp). "
        "auto: only where nothing else fits.",
    )
    ranks: int = Field(
        0, ge=0, le=100_000, description="Processes; 0: one per GPU, or up to two per host where there is none."
    )
    precision: Literal["auto", Precision] = Field(
        "auto",
        description="Arithmetic of matrix products; weights and optimizer stay fp32. fp16 scales the loss dynamically. "
        "fp8: the layers' products only, with bf16 around them. auto: bf16, fp16 or fp32, by what the devices have.",
    )
    shares: Literal["auto", "equal"] | tuple[int, ...] = Field(
        "auto",
        description="Sequences per forward pass of each data-parallel replica. auto: equal, but where devices differ "
        "in proportion to their measured speed, within their memory. equal. Or a list, one number for each replica.",
    )
    rebalance: Literal["auto", "on", "off"] = Field(
        "auto",
        description="While running, let shares follow the measured times of steps; the batch and its order stay, sums "
        "are taken in another order, so that two such runs differ by rounding. auto: where the plan's shares are "
        "unequal.",
    )
    bucket_mib: int = Field(25, ge=1, le=4096, description="ddp, zero1-3: MiB of gradients per reduction.")
    gradient_as_bucket_view: bool = Field(
        True, description="ddp: gradients live in the buckets, which saves a copy of them."
    )
    static_graph: bool = Field(
        False, description="ddp: promise that every step uses the same parameters in the same way."
    )
    compression: Literal["none", "bf16", "topk", "powersgd"] = Field(
        "none",
        description="ddp: how gradients travel, for slow links. bf16: half the bytes (also local-sgd's). topk: "
        "the largest numbers only, the rest is kept for later steps (error feedback). powersgd: as products of thin "
        "matrices, the rest kept too.",
    )
    topk_ratio: float = Field(0.1, gt=0, lt=1, description="Compression topk: share of the numbers that is sent.")
    powersgd_rank: int = Field(4, ge=1, le=1024, description="Compression powersgd: columns of the thin matrices.")
    compress_after_steps: int = Field(
        0, ge=0, le=100_000_000, description="Updates whose gradients still travel whole, before compression begins."
    )
    group_ranks: int = Field(
        0, ge=0, le=100_000, description="hsdp, local-sgd: data-parallel ranks in a group; 0: those of a host."
    )
    outer_every_steps: int = Field(
        500, ge=1, le=1_000_000, description="local-sgd: steps that groups make by themselves between two outer steps."
    )
    outer_learning_rate: float = Field(0.7, gt=0, le=10, description="local-sgd: learning rate of the outer steps.")
    outer_momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="local-sgd: Nesterov momentum of the outer steps; 0 and rate 1 average the weights.",
    )
    timeout_s: int = Field(600, ge=10, le=86_400, description="Give up on a collective after this many seconds.")

    @model_validator(mode="after")
    def check(self) -> ParallelConfig:
        """What can be combined: pp with ddp, tp with ddp and fsdp, offload with zero1-3 and fsdp."""
        anyhow = self.strategy == "auto"
        if self.pp > 1 and not (anyhow or self.strategy in WITH_PP):
            raise ValueError(
                f"parallel.pp = {self.pp} runs with parallel.strategy=ddp, not {self.strategy}: "
                "gradients must stay whole on each rank until the last micro-batch"
            )
        if self.pp <= 1 and self.pp_stages_per_rank > 1:
            raise ValueError(
                f"parallel.pp_stages_per_rank = {self.pp_stages_per_rank} needs a pipeline: set parallel.pp above 1"
            )
        if self.tp > 1 and not (anyhow or self.strategy in WITH_TP):
            raise ValueError(f"parallel.tp = {self.tp} runs with parallel.strategy=ddp or fsdp, not {self.strategy}")
        possible = ("none", *OFFLOADS.get(self.strategy, ()))
        if self.offload not in ("auto", *possible) and not anyhow:
            raise ValueError(
                f"parallel.offload={self.offload} is not there for parallel.strategy={self.strategy}: "
                f"it can have {', '.join(possible)}"
            )
        if self.rebalance == "on" and self.pp > 1:
            raise ValueError(
                f"parallel.rebalance=on is not there for parallel.pp = {self.pp}: a pipeline's schedule is built for "
                "one micro-batch; set parallel.rebalance=off, the plan's shares may still be unequal"
            )
        if not isinstance(self.shares, str) and (not self.shares or min(self.shares) < 1):
            raise ValueError(
                f"parallel.shares = {list(self.shares)}: each replica needs at least 1 sequence; give one number "
                "for each, or set parallel.shares=auto"
            )
        return self

    @model_validator(mode="after")
    def check_communication(self) -> ParallelConfig:
        """Which strategies compress, which have groups."""
        possible = ("none", *COMPRESSIONS.get(self.strategy, ()))
        if self.compression not in possible or (self.compression != "none" and self.pp > 1):
            raise ValueError(
                f"parallel.compression={self.compression} is not there for parallel.strategy={self.strategy} with "
                f"parallel.pp = {self.pp}: it can have {', '.join(possible)}; ddp has them all, without a pipeline"
            )
        if self.group_ranks and self.strategy not in IN_GROUPS:
            raise ValueError(
                f"parallel.group_ranks = {self.group_ranks} would not be used by parallel.strategy={self.strategy}: "
                f"set it to 0, or choose {' or '.join(IN_GROUPS)}"
            )
        return self
