"""What a run is: the one typed config that every door (preset, YAML file, UI form) leads to.

Every field has a description, bounds and a literal default, so that a form made from the schema
explains itself. Combinations that no single field can rule out are refused in each section's `check`, with the cure.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """One frozen section of the config; an unknown field is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenizerConfig(Part):
    kind: Literal["bpe", "pretrained", "characters", "bytes"] = Field(
        "bpe",
        description="bpe: a byte-level BPE trained on the corpus. pretrained: loaded from `path`. "
        "characters: one token per character of the corpus. bytes: one token per UTF-8 byte.",
    )
    path: str = Field("", description="Folder or hub name of a pretrained tokenizer; only for kind=pretrained.")
    vocab_size: int = Field(
        0,
        ge=0,
        le=2_000_000,
        description="Size of the trained BPE vocabulary; 0: 4096. For kind=pretrained the size to expect; 0: any.",
    )
    sample_mib: int = Field(64, ge=1, le=10_000, description="MiB of training text that a BPE is trained on.")

    @property
    def bpe_size(self) -> int:
        return self.vocab_size or 4096

    @model_validator(mode="after")
    def check(self) -> TokenizerConfig:
        if self.kind == "pretrained" and not self.path:
            raise ValueError("data.tokenizer.path is empty: set it to a tokenizer's folder or hub name")
        if self.kind == "bpe" and self.bpe_size < 258:
            raise ValueError(
                f"data.tokenizer.vocab_size = {self.vocab_size} is below 258 (256 bytes + 2 special tokens): "
                "raise it, or use data.tokenizer.kind=bytes"
            )
        return self


class DataConfig(Part):
    path: str = Field(
        "",
        description="The corpus: `stdlib` (this Python's own library), a file or a folder "
        "(.txt .md .py .jsonl .csv .parquet …), or `hub:OWNER/NAME` for a Hugging Face data set.",
    )
    column: str = Field("text", description="Column or JSON key that holds the text.")
    text_unit: Literal["file", "line", "paragraph"] = Field(
        "file", description="What counts as one document in plain-text files."
    )
    hub_config: str = Field("", description="Configuration name of a hub data set.")
    hub_revision: str = Field("", description="Commit or tag of a hub data set; empty: its newest commit.")
    hub_split: str = Field("train", description="Split of a hub data set to read.")
    streaming: bool = Field(False, description="Read a hub data set as a stream, without downloading it whole.")
    tokenizer: TokenizerConfig = Field(TokenizerConfig(), description="How text becomes tokens.")
    split: Literal["auto", "documents", "tail"] = Field(
        "auto",
        description="Held-out part. documents: whole documents, by a hash of their name or place. "
        "tail: the last characters of the corpus. auto: documents if there are at least 20, else tail.",
    )
    validation_fraction: float = Field(
        0.1, gt=0.0, lt=0.9, description="Share of documents (or of characters, for tail) held out for validation."
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description="A document that cannot be read: stop with its place, or skip it and count it."
    )
    shard_mib: int = Field(8, ge=1, le=4096, description="MiB of text per token shard.")
    processes: int = Field(0, ge=0, le=512, description="Tokenizing processes; 0: one per core.")


class ModelConfig(Part):
    architecture: Literal["llama", "gpt2", "bert", "path"] = Field(
        "llama", description="Model class; `path` takes any Hugging Face config.json from `path`."
    )
    path: str = Field("", description="Folder or hub name of a Hugging Face model.")
    init: Literal["random", "pretrained"] = Field(
        "random", description="random: fresh weights. pretrained: continue from the weights in `path`."
    )
    layers: int = Field(4, ge=1, le=1000, description="Transformer layers.")
    width: int = Field(256, ge=8, le=65_536, description="Hidden size.")
    heads: int = Field(8, ge=1, le=1024, description="Attention heads.")
    kv_heads: int = Field(0, ge=0, le=1024, description="Key/value heads (llama); 0: as many as heads.")
    mlp_width: int = Field(
        0, ge=0, le=1_000_000, description="Width inside the MLP; 0: 4 x width (llama: 8/3 x width, up to 64s)."
    )
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout while training (llama: on attention only).")
    tie_embeddings: bool = Field(True, description="Input and output embeddings are one matrix.")
    rope_theta: float = Field(10_000.0, gt=0, description="Base of the rotary position embedding (llama).")

    @model_validator(mode="after")
    def check(self) -> ModelConfig:
        kv_heads, from_path = self.kv_heads or self.heads, self.architecture == "path" or self.init == "pretrained"
        if from_path and not self.path:
            raise ValueError("model.path is empty: set it to a Hugging Face model's folder or hub name")
        if self.path and not from_path:
            raise ValueError(
                f"model.path = {self.path!r} would not be used: set model.init=pretrained for its weights, "
                "or model.architecture=path for its shape"
            )
        if not from_path and self.width % self.heads:
            raise ValueError(
                f"model.width = {self.width} is not divisible by model.heads = {self.heads}: "
                f"change model.width to a multiple of {self.heads}, or model.heads"
            )
        if not from_path and self.architecture == "llama" and (self.width // self.heads) % 2:
            raise ValueError(
                f"model.width / model.heads = {self.width // self.heads} is odd, rotary positions need an even "
                "head size: change model.width or model.heads"
            )
        if self.heads % kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not divisible by model.kv_heads = {kv_heads}: change one of them"
            )
        return self


class TrainConfig(Part):
    steps: int = Field(1000, ge=1, le=100_000_000, description="Optimizer steps.")
    context: int = Field(256, ge=8, le=1_000_000, description="Tokens per sequence.")
    global_batch: int = Field(16, ge=1, le=1_000_000, description="Sequences per optimizer step, over all ranks.")
    micro_batch: int = Field(
        0, ge=0, le=100_000, description="Sequences per rank and forward pass; 0: the most that fits."
    )
    learning_rate: float = Field(3e-4, gt=0, le=10, description="Peak learning rate.")
    min_learning_rate: float = Field(3e-5, ge=0, le=10, description="Learning rate at the end of the cosine.")
    warmup_steps: int = Field(100, ge=0, le=10_000_000, description="Steps of linear warm-up.")
    decay_steps: int = Field(0, ge=0, le=100_000_000, description="Step at which the cosine ends; 0: the last step.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the first moment.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the second moment.")
    weight_decay: float = Field(0.1, ge=0, le=10, description="AdamW: decay, on matrices only.")
    clip_norm: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0: never.")
    mask_fraction: float = Field(0.15, gt=0, lt=1, description="Masked-LM models: share of tokens to predict.")
    log_every_steps: int = Field(10, ge=1, description="Steps between two rows of metrics.")
    seed: int = Field(1337, ge=0, le=2**32 - 1, description="Fixes weights, data order, dropout and masks.")

    @model_validator(mode="after")
    def check(self) -> TrainConfig:
        if self.micro_batch > self.global_batch:
            raise ValueError(
                f"train.micro_batch = {self.micro_batch} exceeds train.global_batch = {self.global_batch}: "
                "lower train.micro_batch or set it to 0"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate = {self.min_learning_rate:g} exceeds "
                f"train.learning_rate = {self.learning_rate:g}: lower it"
            )
        return self


class ParallelConfig(Part):
    strategy: Literal["single", "ddp", "zero1", "zero2", "zero3"] = Field(
        "ddp", description="How the ranks share the work: one process, DDP, or DeepSpeed ZeRO stage 1, 2, 3."
    )
    ranks: int = Field(
        0, ge=0, le=100_000, description="Processes; 0: one per GPU, or up to two per host where there is none."
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Arithmetic of matrix products; weights and optimizer stay fp32. auto: measured."
    )
    timeout_s: int = Field(600, ge=10, le=86_400, description="Give up on a collective after this many seconds.")


class CheckpointConfig(Part):
    every_steps: int = Field(500, ge=1, description="Steps between two checkpoints; the last step always has one.")
    keep_last: int = Field(2, ge=1, le=1000, description="Whole checkpoints to keep.")


class EvaluationConfig(Part):
    every_steps: int = Field(250, ge=0, description="Steps between quick validations while training; 0: none.")
    quick_sequences: int = Field(64, ge=1, le=1_000_000, description="Sequences in a quick validation.")
    prompts: tuple[str, ...] = Field(("",), description="Prompts of the samples that each evaluation generates.")
    sample_tokens: int = Field(64, ge=1, le=100_000, description="New tokens per sample.")
    temperature: float = Field(0.8, ge=0, le=10, description="Sampling temperature; 0: greedy.")
    top_k: int = Field(50, ge=0, le=1_000_000, description="Sample from the k likeliest tokens; 0: from all.")


class ExportConfig(Part):
    max_logit_difference: float = Field(
        1e-3, gt=0, description="Parity bound: largest |ONNX - torch| of any logit on held-out text."
    )
    min_argmax_agreement: float = Field(
        0.999, gt=0, le=1, description="Parity bound: share of positions whose likeliest token is the same."
    )
    parity_sequences: int = Field(8, ge=1, le=10_000, description="Held-out sequences that parity is checked on.")


class RegistryConfig(Part):
    model_name: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", description="Name in the MLflow registry; empty: the run's name."
    )
    min_improvement: float = Field(
        0.0, ge=0, description="Nats per token by which a challenger must beat the champion's validation loss."
    )


class RunConfig(Part):
    """One run, whole: corpus, model, training, machines, checks and the name it is registered under."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Short name of the run.")
    data: DataConfig = Field(DataConfig(), description="The corpus and how it becomes tokens.")
    model: ModelConfig = Field(ModelConfig(), description="The model's shape and where its weights come from.")
    train: TrainConfig = Field(TrainConfig(), description="Batch, schedule, optimizer, seed.")
    parallel: ParallelConfig = Field(ParallelConfig(), description="Strategy, ranks and precision.")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="When to save and what to keep.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Validation and samples.")
    export: ExportConfig = Field(ExportConfig(), description="Bounds that an exported model must keep.")
    registry: RegistryConfig = Field(RegistryConfig(), description="Registered name and the gate to champion.")

    @property
    def objective(self) -> Literal["causal", "masked"]:
        """BERT predicts masked tokens, all others the next one."""
        return "masked" if self.model.architecture == "bert" else "causal"

    @property
    def model_name(self) -> str:
        return self.registry.model_name or self.name

    @model_validator(mode="after")
    def check(self) -> RunConfig:
        """Refuse combinations over sections that cannot work, with the numbers and the cure."""
        train, parallel = self.train, self.parallel
        if parallel.ranks and train.global_batch % parallel.ranks:
            raise ValueError(
                f"train.global_batch = {train.global_batch} cannot be dealt evenly to parallel.ranks = "
                f"{parallel.ranks}: make train.global_batch a multiple of {parallel.ranks}, or change parallel.ranks"
            )
        if parallel.strategy == "single" and parallel.ranks > 1:
            raise ValueError(
                f"parallel.strategy=single runs on 1 rank, parallel.ranks = {parallel.ranks}: "
                "choose ddp or zero1-3, or set parallel.ranks=1"
            )
        return self
