"""The champion measured on a run's own held-out text, so that the loss gate can compare over different data."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from tasks.evaluate import evaluate, find_subject
from tasks.evaluation_record import record
from tasks.judging import LOSS_ON
from tasks.registry import CHAMPION, TAG, aliases_of, registry_client
from training.data_config import DataConfig
from training.evaluation_config import EvaluationConfig
from training.records import RunPlan, TokenShards
from training.serving_config import InferenceConfig

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

logger = logging.getLogger(__name__)


def measure_champion(plan: RunPlan, shards: TokenShards, *, tracking_uri: str) -> str:
    """What was measured, or why nothing was; empty where there is nothing to measure.

    Losses per token compare only between equal tokenizers. A champion of the same data has its loss already.
    """
    client, name = registry_client(tracking_uri), plan.config.model_name
    champion = _champion(client, name)
    if champion is None or champion.tags.get(f"{TAG}dataset_fingerprint") == shards.fingerprint:
        return ""
    ref = f"{name}/{champion.version}"
    if f"{LOSS_ON}{shards.fingerprint}" in champion.tags:
        return ""
    if champion.tags.get(f"{TAG}tokenizer_sha256") != shards.tokenizer_sha256:
        return f"the champion {ref} has another tokenizer: their losses per token cannot be compared"
    if importlib.util.find_spec("torch") is None:
        return f"the champion {ref} cannot be measured on this run's text: there is no torch on this machine"
    subject = find_subject(ref)
    nothing_more = EvaluationConfig(prompts=())
    report = evaluate(
        subject, data=DataConfig(), evaluation=nothing_more, inference=InferenceConfig(), held_out_of=plan
    )
    record(report, subject, text=f"held-out text of {plan.run_id}")
    return f"the champion {ref} has a loss of {report.loss:.4f} on this run's {report.tokens:,} held-out tokens"


def _champion(client: MlflowClient, name: str) -> ModelVersion | None:
    from mlflow.exceptions import MlflowException

    try:
        number = aliases_of(client, name).get(CHAMPION)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return client.get_model_version(name, str(number)) if number is not None else None
