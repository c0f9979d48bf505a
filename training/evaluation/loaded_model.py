"""Opens a trained model for evaluation: whole on each rank, or shared by ranks as in training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from training.checkpoint.safetensors_files import TensorFiles, file_name, index_name
from training.facts.families import can
from training.facts.model_config import read_settings
from training.models import hugging_face
from training.models.language_model import LanguageModel
from training.models.pretrained import auto_class_of, load_pretrained
from training.models.state import state_of
from training.records.evaluation_plan import EvaluationPlan
from training.records.model_state import saved_shapes, state_differences
from training.runtime.mesh import Mesh, build_mesh
from training.runtime.process import Rank
from training.strategies import Strategy, parallelize

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A loaded model, and this rank's share of it."""

    plan: EvaluationPlan
    rank: Rank
    mesh: Mesh
    model: LanguageModel
    strategy: Strategy

    @property
    def dp_rank(self) -> int:
        return self.plan.places[self.rank.rank].dp

    @property
    def counts(self) -> bool:
        """Whether this rank counts its batches' tokens, because tp and pp peers have the same batches."""
        place = self.plan.places[self.rank.rank]
        return place.tp == place.pp == 0


def open_model(plan: EvaluationPlan, folder: Path, *, rank: Rank) -> Opened:
    """Open the model of a folder in Hugging Face layout, without gradients or optimizer moments. Collective."""
    model, weights = _unfilled(folder, objective=plan.config.objective, precision=plan.precision)
    model.eval().requires_grad_(False)
    mesh = build_mesh(plan)
    # Weights stay fp32 between ranks in any precision of products, so that sharding changes no figure.
    strategy = parallelize(
        plan.model_copy(update={"precision": "fp32"}), mesh, model, weights=weights, device=rank.device
    )
    return Opened(plan, rank, mesh, model, strategy)


def _unfilled(folder: Path, *, objective: str, precision: str) -> tuple[LanguageModel, Mapping[str, Tensor]]:
    """Return the model, if possible without weights, and its weights by name, of which each rank takes its part."""
    settings, auto_class = read_settings(folder), auto_class_of(objective)
    saved = any((folder / name).exists() for name in (index_name("model"), file_name("model", number=0, of=1)))
    if can(settings.model_type, "fresh") and saved:
        with hugging_face.without_weights():
            hf = auto_class.from_config(settings, dtype=torch.float32)
        hf.tie_weights()
        model = LanguageModel(hf, precision=precision)
        if not state_differences(saved_shapes(folder), model.state_shapes):
            return model, TensorFiles(folder, "model")
    logger.info("%s: loaded whole on each rank, because only its class can read its weights", folder)
    hf = load_pretrained(auto_class, folder, dtype=torch.float32)
    return LanguageModel(hf, precision=precision), {name: tensor.detach() for name, tensor in state_of(hf).items()}
