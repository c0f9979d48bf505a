"""A class that is not in training/models/architectures.py trains whole; what it cannot have is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.support.layouts import LAYOUTS
from tests.support.ranks import losses, run_ranks
from tests.support.tiny_shards import VOCAB
from tests.training.strategies.test_strategies import COMMON, assert_equal_training

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
STEPS = 20  # so many until it has learned something
CONFIG = COMMON | {"model__architecture": "path", "train__steps": STEPS}
NEOX = SIZES | {"vocab_size": VOCAB, "max_position_embeddings": 64, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("neox")
    AutoConfig.for_model("gpt_neox", **NEOX, hidden_dropout=0.0, attention_dropout=0.0).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def alone(neox: str, make_run: Callable[..., Path]) -> Callable[[str], Path]:
    """The run of one process; made once per packing."""
    made: dict[str, Path] = {}

    def run(packing: str) -> Path:
        if packing not in made:
            config = CONFIG | {"model__path": neox, "train__packing": packing}
            made[packing] = make_run(f"alone {packing}", **config, parallel__strategy="single", train__micro_batch=8)
            run_ranks(made[packing])
        return made[packing]

    return run


@pytest.mark.parametrize("layout", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero3"))])
@pytest.mark.parametrize("packing", ["stream", "padded"])
def test_a_generic_class_trains_under_the_data_parallel_strategies(
    layout: str, packing: str, neox: str, alone: Callable[[str], Path], make_run: Callable[..., Path]
) -> None:
    config = CONFIG | {"model__path": neox, "train__packing": packing}
    ranks, parallel = LAYOUTS[layout]
    shared = make_run(f"{layout} {packing}", ranks=ranks, **config, **parallel, train__micro_batch=1)
    run_ranks(shared)
    assert_equal_training(alone(packing), shared)


@pytest.mark.parametrize("packing", ["stream", "padded"])
def test_a_generic_class_learns(packing: str, alone: Callable[[str], Path]) -> None:
    logged = losses(alone(packing))
    assert logged[STEPS] < logged[1] - 0.2


def test_document_masks_are_refused_since_its_attention_is_its_own(neox: str, make_run: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"a gpt_neox model has its own: set train.packing=padded"):
        make_run("masked", model__architecture="path", model__path=neox, model__dropout=0.0, train__packing="documents")
