"""A mixture of three real texts: Shakespeare, Tang poems, Python's standard library."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.data.corpus import prepare_corpus
from tasks.planning.plan import plan_run
from tests.support.configs import inventory, tiny_config
from tests.support.repository import REPO
from training.config.run import RunConfig
from training.data.loader import Loader
from training.records.plan import RunPlan
from training.records.token_shards import TokenShards

DATA = Path(os.environ.get("SHARDLINE_TEST_DATA", REPO.parent / "shared" / "data"))
WEIGHTS = {"tinyshakespeare": 1.0, "tang_poems": 2.5, "stdlib": 4.5}
STEPS, GLOBAL_BATCH, CONTEXT = 900, 24, 64
PHASE = {"from_share": 0.75, "weights": {"tinyshakespeare": 3.0, "tang_poems": 1.0}}
Corpus = tuple[RunConfig, Path, TokenShards]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"no texts in {DATA}: set SHARDLINE_TEST_DATA to a folder with them"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    paths = {"tinyshakespeare": f"{DATA}/tinyshakespeare.txt", "tang_poems": f"{DATA}/tang_poems.jsonl"}
    sources = [{"path": paths.get(name, name), "weight": weight} for name, weight in WEIGHTS.items()]
    config = tiny_config(
        data__path="",
        data__sources=sources,
        data__phases=[PHASE],
        data__tokenizer={"kind": "bpe", "vocab_size": 4096, "sample_mib": 6},
        train__steps=STEPS,
        train__global_batch=GLOBAL_BATCH,
        train__context=CONTEXT,
    )
    return config, *prepare_corpus(config.data, tokens_home=tmp_path_factory.mktemp("tokens"))


def plan_of(corpus: Corpus, *, ranks: int) -> RunPlan:
    config, folder, shards = corpus
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"ranks": ranks})})
    return plan_run(config, inventory=inventory(ranks), shards=shards, shards_dir=folder)


def test_the_shares_of_a_whole_run_are_the_weights(corpus: Corpus) -> None:
    plan = plan_of(corpus, ranks=1)
    loader = Loader(plan, dp_rank=0, device=torch.device("cpu"))
    borders = [stop for _, stop in loader.stream.parts]
    seen = np.zeros((2, 3))
    for step in range(STEPS):
        spans = loader.spans(step)
        sources = np.searchsorted(borders, spans[:, 1], side="right")
        np.add.at(seen[int(step >= 0.75 * STEPS)], sources, spans[:, 2] - spans[:, 1])
    for tokens, weights in zip(seen, ([1.0, 2.5, 4.5], [3.0, 1.0, 0.0]), strict=True):
        shares, wanted = tokens / tokens.sum(), np.array(weights) / sum(weights)
        assert np.abs(shares - wanted).max() < 0.001, shares
    epochs = [source.epochs * source.tokens for source in plan.sources]
    assert epochs == pytest.approx(seen.sum(0).tolist())


def test_a_resume_on_another_world_size_has_the_same_batches_to_the_bit(corpus: Corpus) -> None:
    cpu = torch.device("cpu")
    one = Loader(plan_of(corpus, ranks=1), dp_rank=0, device=cpu)
    resumed = {ranks: plan_of(corpus, ranks=ranks) for ranks in (2, 3, 4)}
    loaders = {
        ranks: [Loader(plan, dp_rank=rank, device=cpu) for rank in range(plan.dp)] for ranks, plan in resumed.items()
    }
    for step in (0, 1, 317, 674, 675, 676, STEPS - 1):
        whole = torch.cat([batch.inputs for batch in one.share(step).batches])
        for ranks, own in loaders.items():
            parts = [batch.inputs for loader in own for batch in loader.share(step).batches]
            assert torch.equal(torch.cat(parts), whole), f"step {step} on {ranks} ranks"
