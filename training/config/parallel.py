"""The parallel section of the config: how ranks share a model, a batch and its gradients, and in which precision."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from training.config.device_names import DeviceName, check_keys
from training.config.section import Section
from training.facts.strategies import IN_SHARDS, STRATEGIES, Strategy, StrategyName, having, offloads

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Stages = tuple[tuple[int, ...], ...]  # layers of each pipeline stage, by data-parallel replica


class ParallelConfig(Section):
    """The distribution of training over devices, and its precision."""

    strategy: Literal["auto", StrategyName] = "auto"
    """How data-parallel ranks share weights, gradients and optimizer state. single: one process. ddp: each rank holds
    everything. fsdp: each rank holds a shard (FSDP2). zero1, zero2, zero3: DeepSpeed ZeRO by stage; zero1 with tp, pp
    or Muon is our own: optimizer state in shards. hsdp: FSDP2 within groups of ranks that hold the same. local-sgd: DDP
    within groups that synchronize only now and then (DiLoCo). auto: the fastest that is predicted to fit in memory.
    """
    tp: int = Field(0, ge=0, le=1024)
    """Tensor parallelism: the number of ranks that split each layer's matrices; 0 lets the plan choose (1 if a strategy
    is set).
    """
    cp: int = Field(0, ge=0, le=1024)
    """Context parallelism, for long contexts: the number of ranks that share the tokens of each sequence, each of which
    computes a part of it; 0 lets the plan choose (1, unless nothing else fits).
    """
    sequence_parallel: Literal["auto", "on", "off"] = "auto"
    """With tp, whether each of its ranks has a piece of every sequence between attention and MLP, where norms, dropout
    and residuals would otherwise be computed and kept by all of them. auto: on GPUs, where it sends no more; on CPUs
    where the plan predicts that it is faster or that nothing else fits.
    """
    async_tp: bool = False
    """Whether compiled layers overlap tensor parallelism's gathers and sums with matrix products, by sending them in
    pieces (torch's micro-pipelined tensor parallelism). It needs tp above 1, sequence_parallel, train.compile=true, and
    GPUs of one host that can access each other's memory.
    """
    pp: int = Field(0, ge=0, le=1024)
    """Pipeline parallelism: the number of ranks over which the layers are distributed; 0 lets the plan choose (1 if a
    strategy is set).
    """
    pp_stages_per_rank: int = Field(0, ge=0, le=64)
    """Number of pipeline stages on each rank: 1 uses the 1F1B schedule, more use interleaved 1F1B; 0 lets the plan
    choose (1 if pp is set).
    """
    stages: Literal["auto", "even"] | Stages = "auto"
    """Number of layers of each pipeline stage, as one list for each data-parallel replica: [[24], [10, 14]] is one
    device that holds 24 layers, and a pipeline of two. Replicas take the devices in their order. even: equal replicas
    of equal stages. auto: even, unless devices are unlike and replicas of unlike shape are predicted to be faster.
    """
    offload: Literal["auto", "none", "optimizer", "parameters"] = "auto"
    """What is kept in host memory instead of GPU memory. optimizer: the optimizer state (zero1-3). parameters: weights
    and optimizer state (zero3, fsdp, hsdp). auto: nothing, unless nothing else fits.
    """
    reshard_after_forward: Literal["auto", "on", "off"] = "auto"
    """Whether each layer's gathered weights are freed after its forward pass, and gathered again for its backward pass,
    for fsdp and hsdp. off: all weights stay gathered from the first forward pass of a step to its last backward pass,
    and travel once a step. auto: off where the plan predicts that it is faster and fits.
    """
    reduce_gradients: Literal["auto", "each", "last"] = "auto"
    """When ranks reduce gradients, for fsdp and hsdp. each: after each micro-batch, so that a rank keeps only its
    shard. last: after the step's last micro-batch; until then each rank keeps whole gradients, 4 bytes per parameter.
    auto: last if the plan predicts that it is faster and fits.
    """
    ranks: int = Field(0, ge=0, le=100_000)
    """Number of processes that train; 0 means one per GPU, or up to two per host without GPUs."""
    precision: Literal["auto", Precision] | dict[DeviceName, Precision] = "auto"
    """Precision of matrix products; weights and optimizer state stay in fp32. fp16: with dynamic loss scaling. fp8: for
    the layers' products only, with bf16 for the rest. auto: bf16, fp16 or fp32, by what the devices support. By device,
    for ddp and local-sgd: {A100: bf16, V100: fp16}, with names or kinds (cuda, cpu) that match as in
    prices.per_device_hour.
    """
    fp8_by: Literal["shardline", "torchao"] = "shardline"
    """Implementation of fp8 matrix products, for precision=fp8. shardline: Shardline's own, on any device and mesh.
    torchao: torchao's linear layers, whose casts are compiled; fsdp and hsdp then gather weights in 8 bits. It works
    for Llama and BERT models without tp, on GPUs, with train.compile=true.
    """
    shares: Literal["auto", "equal"] | tuple[int, ...] = "auto"
    """Sequences per forward pass of each data-parallel replica. equal: the same for all. auto: equal on equal devices,
    otherwise in proportion to their measured speed and within their memory. A list gives one number per replica.
    """
    rebalance: Literal["auto", "on", "off"] = "auto"
    """Adjust the replicas' shares during training to their measured step times. The batch stays the same, but sums are
    taken in another order, so two such runs differ by rounding. auto: only if the plan's shares are unequal.
    """
    bucket_mib: int = Field(25, ge=1, le=4096)
    """Amount of gradients, in MiB, that one reduction sends, for ddp and zero1-3."""
    compression: Literal["none", "bf16", "topk", "powersgd"] = "none"
    """How gradients are compressed for slow networks, for ddp. bf16: half the bytes (also for local-sgd). topk: only
    the largest values are sent. powersgd: products of two thin matrices are sent. topk and powersgd add what was not
    sent to later steps (error feedback).
    """
    topk_ratio: float = Field(0.1, gt=0, lt=1)
    """Fraction of the gradient values that is sent, for compression=topk."""
    powersgd_rank: int = Field(4, ge=1, le=1024)
    """Rank (number of columns) of the thin matrices, for compression=powersgd."""
    compress_after_steps: int = Field(0, ge=0, le=100_000_000)
    """Number of optimizer steps with uncompressed gradients before compression begins."""
    group_ranks: int = Field(0, ge=0, le=100_000)
    """Number of data-parallel ranks in a group, for hsdp and local-sgd; 0 means the ranks of one host."""
    outer_every_steps: int = Field(500, ge=1, le=1_000_000)
    """Steps that each group makes on its own between two outer steps, for local-sgd."""
    outer_learning_rate: float = Field(0.7, gt=0, le=10)
    """Learning rate of the outer steps, for local-sgd."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the outer steps, for local-sgd. Momentum 0 with learning rate 1 averages the groups'
    weights.
    """
    timeout_s: int = Field(600, ge=10, le=86_400)
    """Seconds after which a collective operation that has not finished fails."""

    @property
    def row(self) -> Strategy:
        """The strategy's row; while the plan is to choose it, that of one process, which goes with nothing."""
        return STRATEGIES[self.strategy] if self.strategy != "auto" else Strategy()

    @property
    def asked_ranks(self) -> int:
        """The number of ranks; 0: as many as there are devices."""
        return 1 if self.strategy == "single" else self.ranks

    @model_validator(mode="after")
    def check(self) -> ParallelConfig:
        """Raises ValueError for combinations that do not work, of strategy with pp, tp and offload."""
        anyhow = self.strategy == "auto"
        if self.pp <= 1 and self.pp_stages_per_rank > 1:
            raise ValueError(
                f"parallel.pp_stages_per_rank = {self.pp_stages_per_rank} needs a pipeline: set parallel.pp above 1"
            )
        for axis, size, hint in (("pp", self.pp, " (fsdp shards weights, zero1 moments only)"), ("tp", self.tp, "")):
            if size > 1 and not (anyhow or getattr(self.row, axis)):
                raise ValueError(
                    f"parallel.{axis} = {size} runs with parallel.strategy={', '.join(having(axis))}, not "
                    f"{self.strategy}: choose one of them{hint}, or parallel.{axis}=1"
                )
        if self.cp > 1 and (self.pp > 1 or not (anyhow or self.row.cp)):
            raise ValueError(
                f"parallel.cp = {self.cp} runs with parallel.strategy={' or '.join(having('cp'))}, with or without tp, "
                f"and without a pipeline; not with {self.strategy} and pp = {self.pp}: change them, or set parallel.cp "
                "to 1"
            )
        if self.sequence_parallel == "on" and (self.tp == 1 or (self.tp == 0 and not anyhow)):
            raise ValueError(
                f"parallel.sequence_parallel=on splits sequences over tp ranks, and parallel.tp = {self.tp} has "
                "none to share with: set parallel.tp above 1, or sequence_parallel=auto"
            )
        possible = ("none",) if self.strategy == "auto" else ("none", *offloads(self.strategy, tp=self.tp, pp=self.pp))
        if self.offload not in ("auto", *possible) and not anyhow:
            raise ValueError(
                f"parallel.offload={self.offload} is not there for parallel.strategy={self.strategy} with "
                f"parallel.tp = {self.tp} and pp = {self.pp}: set it to {' or '.join(('auto', *possible))}"
            )
        self._check_shards()
        if not isinstance(self.precision, str):
            check_keys("parallel.precision", self.precision)
            if not self.precision:
                raise ValueError("parallel.precision = {} names no device: set parallel.precision=auto")
        if not isinstance(self.shares, str) and (not self.shares or min(self.shares) < 1):
            raise ValueError(
                f"parallel.shares = {list(self.shares)}: each replica needs at least 1 sequence; give one number "
                "for each, or set parallel.shares=auto"
            )
        return self

    def _check_shards(self) -> None:
        """Raise ValueError if the strategy does not shard weights, or if a pipeline or offload decides these fields."""
        fields = {"reshard_after_forward": self.reshard_after_forward, "reduce_gradients": self.reduce_gradients}
        for field, asked in fields.items():
            if asked != "auto" and (self.pp > 1 or self.strategy not in ("auto", *IN_SHARDS)):
                raise ValueError(
                    f"parallel.{field}={asked} has no effect with parallel.strategy={self.strategy} and pp = {self.pp}"
                    f": set it to auto, or use {' or '.join(IN_SHARDS)} without a pipeline (pipelines always gather "
                    "and reduce once a step)"
                )
            if asked in ("off", "last") and self.offload == "parameters":
                raise ValueError(
                    f"parallel.{field}={asked} keeps on the device what parallel.offload=parameters keeps in the "
                    "host's memory: change one of them"
                )

    @model_validator(mode="after")
    def check_stages(self) -> ParallelConfig:
        """Raises ValueError for stages that do not go with the other fields."""
        if isinstance(self.stages, str):
            return self
        asked = f"parallel.stages = {[list(sizes) for sizes in self.stages]}"
        if self.cp > 1:
            raise ValueError(
                f"{asked}: pipelines do not share sequences (parallel.cp = {self.cp}): set parallel.cp to 1"
            )
        if not self.stages or any(not sizes or min(sizes) < 1 for sizes in self.stages):
            raise ValueError(f"{asked}: each replica needs a list, and each stage at least 1 layer")
        if len({sum(sizes) for sizes in self.stages}) > 1:
            sums = [sum(sizes) for sizes in self.stages]
            raise ValueError(f"{asked}: replicas have {sums} layers, and must all have those of the model")
        longest, ranks = max(map(len, self.stages)), max(1, self.tp) * sum(map(len, self.stages))
        if (
            not (self.strategy == "auto" or self.row.sizes_stages)
            or self.pp_stages_per_rank > 1
            or self.pp not in (0, longest)
        ):
            raise ValueError(
                f"{asked} with parallel.strategy={self.strategy}, pp={self.pp}, pp_stages_per_rank="
                f"{self.pp_stages_per_rank}: stages of given sizes run with ddp, pp={longest} (or 0), one stage a rank"
            )
        if self.ranks not in (0, ranks):
            raise ValueError(f"{asked} are {ranks} ranks with tp, not parallel.ranks = {self.ranks}: set it to 0")
        if self.compression != "none":
            raise ValueError(f"{asked}: parallel.compression={self.compression} is not there for pipelines: set none")
        return self

    @model_validator(mode="after")
    def check_communication(self) -> ParallelConfig:
        """Raises ValueError for strategies without the compression or the groups that are asked for."""
        possible = ("none", *self.row.compressions)
        if self.compression not in possible or (self.compression != "none" and self.pp > 1):
            raise ValueError(
                f"parallel.compression={self.compression} is not there for parallel.strategy={self.strategy} with "
                f"parallel.pp = {self.pp}: it can have {', '.join(possible)}; ddp has them all, without a pipeline"
            )
        if self.group_ranks and not self.row.in_groups:
            raise ValueError(
                f"parallel.group_ranks = {self.group_ranks} would not be used by parallel.strategy={self.strategy}: "
                f"set it to 0, or choose {' or '.join(having('in_groups'))}"
            )
        return self
