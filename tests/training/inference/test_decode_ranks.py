"""Several ranks give the text of one: requests of unlike length, decoded together, with keys and values kept."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.inference.onnx_generator import Sampling, choose_token
from tests.support.ranks import Ranks
from tests.support.tiny_configs import tiny_config
from tests.support.tiny_run import tiny_run
from training.config.serving import InferenceConfig
from training.inference.sampling import SamplingParams, sample_token
from training.planner.reasons.checks import check_inference
from training.records.decoding import (
    CHANNEL,
    CancelRequest,
    DecodePlan,
    DecodeRequest,
    FromRanks,
    NewTokens,
    RanksReady,
    RequestRefused,
    ToRanks,
    read_from_ranks,
    to_line,
)

CONTEXT = 32
TEXTS = ("def", "x", "return a + b  #", "a" * 30, "the prompt is longer than context " * 2)
PROMPTS = [list(text.encode()) for text in TEXTS]
NEW_TOKENS = (20, 9, 24, 22, 5)  # the third and the fourth go beyond the context, the fifth begins there


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint: config.json and model.safetensors."""
    run_dir = tiny_run(tmp_path_factory.mktemp("runs") / request.param, architecture=request.param)
    return run_dir / "checkpoints" / "8"


class Client:
    """Ranks, and the channels of those that lead."""

    def __init__(self, plan: DecodePlan, listener: socket.socket, ranks: Ranks) -> None:
        self.ranks, listener = ranks, listener
        listener.settimeout(60)
        self.channels = [listener.accept()[0].makefile("rwb") for _ in range(plan.leaders)]
        ready = [self.receive(channel=channel) for channel in range(plan.leaders)]
        assert sorted(each.rank for each in ready if isinstance(each, RanksReady)) == [*range(plan.leaders)]

    def send(self, *messages: ToRanks, channel: int = 0) -> None:
        self.channels[channel].write(b"".join(map(to_line, messages)))
        self.channels[channel].flush()

    def receive(self, *, channel: int = 0) -> FromRanks:
        return read_from_ranks(self.channels[channel].readline())

    def ask(self, requests: list[DecodeRequest], *, channel: int = 0) -> dict[int, list[int]]:
        """Tokens of each request."""
        texts: dict[int, list[int]] = {each.number: [] for each in requests}
        self.send(*requests, channel=channel)
        left = len(requests)
        while left:
            new = self.receive(channel=channel)
            assert isinstance(new, NewTokens)
            for number, token in new.tokens:
                texts[number].append(token)
            left -= len(new.ended)
        return texts

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


Start = Callable[..., Client]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients = []

    def started(folder: Path, parallel: str = "none", degree: int = 1, **changes: Any) -> Client:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / CHANNEL))
        listener.listen()
        defaults: dict[str, Any] = {"device_kind": "cpu", "precision": "auto", "context": CONTEXT}
        shared = {"parallel": parallel, "degree": degree, "threads_per_rank": 1}
        plan = DecodePlan.model_validate({**defaults, **shared, "folder": str(folder), **changes})
        plan.write(tmp_path / "decode.json")
        with listener:
            ranks = Ranks(tmp_path / "decode.json", program="training.generate", ranks=degree)
            clients.append(Client(plan, listener, ranks))
        return clients[-1]

    yield started
    for client in clients:  # every rank ends when the channel does, and none with an error
        client.close()
        client.ranks.finish()


def request(number: int, ids: list[int], new_tokens: int, **changes: Any) -> DecodeRequest:
    greedy = {"temperature": 0, "top_k": 0, "top_p": 1, "seed": 1, "stop_ids": ()}
    return DecodeRequest.model_validate({"number": number, "ids": ids, "new_tokens": new_tokens, **greedy, **changes})


def greedy(folder: Path, ids: list[int], new_tokens: int) -> list[int]:
    """What the transformers class generates without a cache; a full context is cut to its last half."""
    model, seen, made = AutoModelForCausalLM.from_pretrained(folder), ids[-CONTEXT:], list[int]()
    with torch.no_grad():
        for _ in range(new_tokens):
            made.append(int(model(torch.tensor([seen])).logits[0, -1].argmax()))
            seen = [*seen, made[-1]]
            seen = seen if len(seen) <= CONTEXT else seen[-CONTEXT // 2 :]
    return made


def same_as_the_plain_model(client: Client, folder: Path) -> None:
    requests = [request(i, ids, n) for i, (ids, n) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))]
    expected = {i: greedy(folder, ids, n) for i, (ids, n) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))}
    assert client.ask(requests) == expected


@pytest.mark.slow
def test_ranks_that_split_the_matrices_give_the_text_of_the_plain_model(folder: Path, start: Start) -> None:
    same_as_the_plain_model(start(folder, "tensor", 2, rows=3), folder)  # fewer rows than there are prompts


def test_ranks_that_have_some_layers_each_give_the_text_of_the_plain_model(folder: Path, start: Start) -> None:
    same_as_the_plain_model(start(folder, "pipeline", 2, rows=2), folder)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_copies_give_the_text_of_the_plain_model(folder: Path, start: Start) -> None:
    client = start(folder, "data", 2)
    same_as_the_plain_model(client, folder)
    assert client.ask([request(7, PROMPTS[0], 20)], channel=1) == {7: greedy(folder, PROMPTS[0], 20)}


@pytest.mark.slow
@pytest.mark.long
def test_a_class_that_is_not_described_runs_whole(start: Start, tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": CONTEXT}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**sizes, **heads)).save_pretrained(tmp_path / "mistral")
    same_as_the_plain_model(start(tmp_path / "mistral", rows=3), tmp_path / "mistral")


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_one_rank_serves_seeds_refuses_foreign_tokens_and_takes_requests_back(folder: Path, start: Start) -> None:
    client = start(folder, rows=2)
    drawn = {"temperature": 1.0, "top_k": 40, "top_p": 0.9}
    alone = client.ask([request(0, PROMPTS[0], 20, seed=5, **drawn)])[0]
    beside = client.ask([request(i, ids, 20, seed=5 + i, **drawn) for i, ids in enumerate(PROMPTS)])
    assert beside[0] == alone  # whatever else is in the batch
    stop = alone.index(alone[9])
    assert client.ask([request(0, PROMPTS[0], 20, seed=5, stop_ids=(10**6, alone[stop]), **drawn)])[0] == alone[:stop]
    assert client.ask([request(0, PROMPTS[0], 0)]) == {0: []}

    client.send(request(1, [258], 5), request(2, PROMPTS[0], 10**6), request(3, PROMPTS[1], 10**6))
    refused = client.receive()
    assert isinstance(refused, RequestRefused)
    assert "from 258 to 258, but the model has 258 tokens" in refused.why
    last = request(4, PROMPTS[1], 9)  # gets a row only when one of the two has left its own
    client.send(CancelRequest(number=2), CancelRequest(number=3), last)
    text: list[int] = []
    while len(text) < 9:
        new = client.receive()
        assert isinstance(new, NewTokens)
        text += [token for number, token in new.tokens if number == 4]
    assert text == greedy(folder, PROMPTS[1], 9)


def test_the_choice_of_a_token_is_that_of_the_other_engine() -> None:
    generator = np.random.default_rng(0)
    for number in range(200):
        logits = generator.normal(size=50).astype(np.float32) * 3
        top_k, top_p = int(generator.integers(0, 60)), float(generator.uniform(0.2, 1)) if number % 4 else 1.0
        torch_random, onnx_random = np.random.default_rng(number), np.random.default_rng(number)
        sampling = Sampling(temperature=0.7, top_k=top_k, top_p=top_p)
        expected = [choose_token(logits, sampling, random=onnx_random) for _ in range(5)]
        params = SamplingParams(0.7, top_k, top_p)
        assert [sample_token(logits, params, torch_random) for _ in range(5)] == expected


def test_what_cannot_be_shared_is_refused_with_the_numbers(folder: Path) -> None:
    def refused(parallel: str, degree: int) -> str:
        with pytest.raises(ValueError, match=r"set inference|choose a degree|lower it") as error:
            check_inference(folder, InferenceConfig(parallel=parallel, degree=degree))  # type: ignore[arg-type]
        return str(error.value)

    degree, heads = (4, "2 key/value heads") if "llama" in str(folder) else (8, "4 attention heads")  # GQA: 4 share 2
    assert f"{heads} cannot be shared by inference.degree = {degree}" in refused("tensor", degree)
    assert "2 layers cannot fill inference.degree = 3 stages: lower it to 2" in refused("pipeline", 3)
    assert "inference.parallel = none: set inference.parallel" in refused("none", 2)
    check_inference(folder, InferenceConfig(parallel="tensor", degree=2))


def test_key_value_heads_of_some_layers_are_checked_too(tmp_path: Path) -> None:
    config = tiny_config("mimo_v2_flash")
    config.swa_num_key_value_heads = 1
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="1 key/value heads cannot be shared"):
        check_inference(tmp_path, InferenceConfig(parallel="tensor", degree=2))
