"""A whole model of any Hugging Face class in one process: transformers decodes, and the rule of sampling.py chooses.

Texts that come at the same time are decoded together by transformers' continuous batching, or one after another by its
`generate`: which of them gives the model's own logits is tried when a model is loaded.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.streamers import BaseStreamer

from training.inference.sampling import SamplingParams, choose_tokens

logger = logging.getLogger(__name__)

ROWS = 16  # maximum number of texts that are decoded together
BATCH_TOKENS = 512  # of prompts that one step reads: running texts wait for one such step
BLOCK_TOKENS = 256  # whose keys and values are allocated together
TOLERANCE = 0.05  # of the largest logit: bf16 rounds otherwise in another order, and wrong attention differs by more
CHECKED_PROMPT, CHECKED_TOKENS = 40, 4  # tokens of the longest prompt that is compared, and of its new text
GREEDY = SamplingParams(temperature=0, top_k=0, top_p=1.0)
ENDED = "transformers' continuous batching has ended"

Emit = Callable[[int], None]


@dataclass(eq=False)
class TokenChoice:
    """Chooses the tokens of one text, whatever is decoded beside it. `logits`: those of its last token."""

    params: SamplingParams
    random: np.random.Generator
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def only_chosen(scores: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Return scores [rows, vocab] that leave each row's chosen token only."""
    logits = scores.float()
    for choice, row in zip(choices, logits, strict=True):
        choice.logits = row
    chosen = choose_tokens(logits, [each.params for each in choices], [each.random for each in choices])
    columns = torch.tensor(chosen, device=scores.device)[:, None]
    return torch.full_like(scores, -torch.inf).scatter_(1, columns, 0)


class Decoder(Protocol):
    """Decodes the texts of a model; called from several threads."""

    rows: int  # texts that are decoded at the same time
    how: str  # for the log

    def decode(
        self, ids: Sequence[int], choice: TokenChoice, *, new_tokens: int, end_ids: list[int], emit: Emit
    ) -> None:
        """Call `emit` for each new token, the one of `end_ids` that ends the text included; its errors end the text."""

    def wait(self) -> None:
        """Return when no more texts can be decoded."""

    def close(self) -> None:
        """Free what it holds beside the model."""


def decoder_of(model: Any, *, context: int) -> Decoder:
    """Return the fastest decoder, of texts of at most `context` tokens, that gives the logits of the model itself.

    Raises ValueError if none does.
    """
    whys = []
    for decoder_class in (DecodeTogether, DecodeOneByOne, DecodeUncached):
        try:
            decoder: Decoder = decoder_class(model, context=context)
        except Exception as error:  # whatever transformers raises for the classes that it cannot batch
            why = f"{type(error).__name__}: {error}"
        else:
            if not (why := _fault(decoder, model, context=context)):
                return decoder
            decoder.close()
        whys.append(f"not {decoder_class.how}, because: {why}")
        logger.warning("%s", whys[-1])
    raise ValueError("no way of transformers to decode this class gives its logits: " + "; ".join(whys))


def _fault(decoder: Decoder, model: Any, *, context: int) -> str:
    """Decode two texts at the same time; return how the logits differ from the model's own, "" if they do not."""

    def decoded(length: int) -> tuple[list[int], Tensor]:
        ids, choice = [*range(1, length + 1)], TokenChoice(GREEDY, np.random.default_rng(0))
        decoder.decode(tuple(ids), choice, new_tokens=CHECKED_TOKENS, end_ids=[], emit=ids.append)
        return ids, choice.logits

    try:
        with ThreadPoolExecutor(2) as pool:
            texts = [*pool.map(decoded, (1, max(1, min(CHECKED_PROMPT, context - CHECKED_TOKENS))))]
        for ids, logits in texts:
            with torch.inference_mode():
                wanted = model(torch.tensor([ids[:-1]], device=model.device)).logits[0, -1].float()
            worst, largest = (logits - wanted).abs().max().item(), wanted.abs().max().item()
            if not worst <= TOLERANCE * largest:
                return f"logits up to {largest:.2g} differ by {worst:.2g}"
    except Exception as error:  # whatever the class raises
        return f"{type(error).__name__}: {error}"
    return ""


class DecodeOneByOne:
    rows, how, use_cache = 1, "one text at a time", True

    def __init__(self, model: Any, *, context: int) -> None:
        self.model, self.lock = model, threading.Lock()
        model.generation_config = GenerationConfig()  # the file's defaults would change the text

    def decode(
        self, ids: Sequence[int], choice: TokenChoice, *, new_tokens: int, end_ids: list[int], emit: Emit
    ) -> None:
        with self.lock:
            self.model.generate(
                torch.tensor([ids], device=self.model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=self.model.device),
                max_new_tokens=new_tokens,
                eos_token_id=end_ids or None,
                pad_token_id=0,  # of no use for one text
                use_cache=self.use_cache,
                logits_processor=LogitsProcessorList([_ChooseOne(choice)]),
                streamer=_Emitter(emit),
            )

    def wait(self) -> None:
        threading.Event().wait()

    def close(self) -> None:
        """Do nothing: it holds nothing."""


class DecodeUncached(DecodeOneByOne):
    how, use_cache = "one text at a time, which is read again for each token", False


class _ChooseOne(LogitsProcessor):
    def __init__(self, choice: TokenChoice) -> None:
        self.choice = choice

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return only_chosen(scores, [self.choice])


class _Emitter(BaseStreamer):
    def __init__(self, emit: Emit) -> None:
        self.emit, self.has_begun = emit, False

    def put(self, value: Tensor) -> None:
        if self.has_begun:
            self.emit(int(value))
        self.has_begun = True  # the first value is the prompt

    def end(self) -> None:
        """Do nothing: `generate` returns then."""


class DecodeTogether:
    rows, how = ROWS, f"up to {ROWS} texts together by transformers' continuous batching"

    def __init__(self, model: Any, *, context: int) -> None:
        if (attention := model.config._attn_implementation) != "sdpa":
            raise ValueError(f"its attention is {attention}")
        settings = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS,
            num_blocks=ROWS * -(-(context + 1) // BLOCK_TOKENS),
            max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=ROWS,
            use_cuda_graph=False,  # tokens are chosen on the host
            use_async_batching=False,
            auto_switch_to_flash=False,  # it may download kernels
        )
        self.model, self.numbers = model, itertools.count()
        self.texts: dict[str, queue.SimpleQueue[Any]] = {}
        self.manager = model.init_continuous_batching(GenerationConfig(do_sample=False, eos_token_id=-1), settings)
        self.manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([_ChooseMany()]))
        self.manager.logit_processor.tensors_required = 1  # counted only for processors that it converts itself
        self.manager.start()
        self.router = threading.Thread(target=self._route, daemon=True)
        self.router.start()

    def decode(
        self, ids: Sequence[int], choice: TokenChoice, *, new_tokens: int, end_ids: list[int], emit: Emit
    ) -> None:
        number, made, has_ended, outputs = str(next(self.numbers)), 0, False, queue.SimpleQueue[Any]()
        self.texts[number] = outputs
        settings = {"max_new_tokens": new_tokens, "streaming": True, "eos_token_id": end_ids or -1}
        try:
            if self.manager.add_request(list(ids), number, choice=choice, **settings) is None:
                raise RuntimeError(ENDED)
            while not has_ended:
                output = outputs.get()
                if output is None or output.error:
                    raise RuntimeError(output.error if output else ENDED)
                for token in output.generated_tokens[made:]:
                    emit(token)
                made, has_ended = len(output.generated_tokens), output.is_finished()
        finally:
            del self.texts[number]
            if not has_ended:
                self.manager.cancel_request(number)

    def wait(self) -> None:
        self.router.join()

    def close(self) -> None:
        self.manager.stop(hard_stop=True)

    def _route(self) -> None:
        for output in self.manager:
            if outputs := self.texts.get(output.request_id):
                outputs.put(output)
        for outputs in list(self.texts.values()):
            outputs.put(None)


class _ChooseMany(ContinuousBatchingLogitsProcessor):
    def __init__(self) -> None:
        self.supported_kwargs, self.ignored_kwargs = {"choice": TokenChoice}, ()
        self.choices: list[TokenChoice] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Do nothing: every request has its choice."""

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        self.choices = [request.state.logit_processor_kwargs["choice"] for request in requests_with_new_token]
        return torch.zeros(len(self.choices), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return only_chosen(scores, self.choices)
