"""Text from an exported model by ONNX Runtime: no torch, and nothing of ours, so that this one file runs anywhere.

It travels inside each registered model version, and `shardline generate`, the server and the pyfunc all use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

# New text is decoded together with this many tokens before it: some decoders (SentencePiece's) drop the
# space before the first token they see, and byte-level ones need the start of a character of several tokens.
ANCHOR_TOKENS = 8
INCOMPLETE = "\ufffd"


class TextGenerator:
    """An open export folder: its ONNX session and its tokenizer. Safe to call from several threads.

    `threads` is ONNX Runtime's number of threads within an operator; 0: one per core.
    Raises ValueError where the folder holds no export, or a masked model.
    """

    def __init__(self, export_dir: Path | str, *, threads: int = 0) -> None:
        folder = Path(export_dir)
        if not (folder / "export.json").is_file():
            raise ValueError(
                f"{folder} has no export.json, so it is no exported model: "
                "make one with `python -m training.export runs/ID/plan.json`"
            )
        export = json.loads((folder / "export.json").read_text())
        if export["objective"] != "causal":
            raise ValueError(
                f"{folder} is a masked model: it fills gaps, there is nothing to continue. "
                "Load it with transformers.AutoModelForMaskedLM, or generate with a llama or gpt2 model"
            )
        self.context: int = export["context"]
        self.end_id: int = export["end_id"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # errors; its warnings are about its own graph optimizer
        # Threads that spin while they wait take 39 instead of 20 ms a token as soon as others use the cores too.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )

    def generate(
        self,
        prompt: str,
        *,
        new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 1337,
        stop_at_end: bool = True,
    ) -> str:
        """The continuation of `prompt`, without it. Equal arguments give equal text.

        temperature 0 is greedy; top_k 0 samples from all tokens. Once prompt and text fill the context, the
        model sees the last `context` tokens. Raises ValueError for arguments out of bounds.
        """
        return "".join(
            self.stream(
                prompt,
                new_tokens=new_tokens,
                temperature=temperature,
                top_k=top_k,
                seed=seed,
                stop_at_end=stop_at_end,
            )
        )

    def stream(
        self,
        prompt: str,
        *,
        new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int = 50,
        seed: int = 1337,
        stop_at_end: bool = True,
    ) -> Iterator[str]:
        """Like `generate`, in pieces as they come, each of whole characters; it raises at the call, not later."""
        if min(new_tokens, top_k, seed) < 0 or not temperature >= 0:  # so that NaN is refused too
            raise ValueError(
                f"new_tokens = {new_tokens}, temperature = {temperature:g}, top_k = {top_k}, seed = {seed}: "
                "none may be below 0"
            )
        # Every document was followed by the end token in training, so after it the model starts a new one.
        prompt_ids = encode_prompt(self.tokenizer, prompt) or [self.end_id]
        new_ids = self._new_ids(
            prompt_ids,
            new_tokens=new_tokens,
            temperature=temperature,
            top_k=top_k,
            random=np.random.default_rng(seed),
            stop_id=self.end_id if stop_at_end else None,
        )
        return self._text_pieces(prompt_ids, new_ids)

    def _new_ids(
        self,
        prompt_ids: list[int],
        *,
        new_tokens: int,
        temperature: float,
        top_k: int,
        random: np.random.Generator,
        stop_id: int | None,
    ) -> Iterator[int]:
        ids = prompt_ids[-self.context :]
        for _ in range(new_tokens):
            token = choose_token(self._next_logits(ids), temperature=temperature, top_k=top_k, random=random)
            if token == stop_id:
                return
            yield token
            ids = [*ids, token][-self.context :]

    def _next_logits(self, ids: list[int]) -> np.ndarray:
        """fp32 [vocab] after `ids`; the whole window is computed anew, there is no cache."""
        (logits,) = self.session.run(["logits"], {"input_ids": np.array([ids], dtype=np.int64)})
        return np.asarray(logits)[0, -1]

    def _text_pieces(self, prompt_ids: list[int], new_ids: Iterator[int]) -> Iterator[str]:
        """Text as far as it is settled: bytes that may be the start of a character wait for the rest."""
        window = prompt_ids[-ANCHOR_TOKENS:]
        shown = len(self._decode(window))
        for token in new_ids:
            window = [*window, token]
            text = self._decode(window)
            settled = max(shown, _settled_length(text))
            if settled > shown:
                yield text[shown:settled]
                shown = settled
            if settled == len(text):
                window = window[-ANCHOR_TOKENS:]
                shown = len(self._decode(window))
        if rest := self._decode(window)[shown:]:
            yield rest

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _settled_length(text: str) -> int:
    """Characters of `text` before a possibly unfinished one: at most 3 bytes of 4, so at most 3 replacements."""
    return max(len(text.rstrip(INCOMPLETE)), len(text) - 3)


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Token IDs of `prompt`. Raises ValueError naming the characters that a characters tokenizer does not know."""
    try:
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    except Exception:  # what `tokenizers` raises; it says neither which text nor which character
        vocabulary = tokenizer.get_vocab()
        unknown = "".join(sorted({character for character in prompt if character not in vocabulary}))
        raise ValueError(
            f"the prompt {prompt!r} has characters that this tokenizer was not made with: {unknown!r}; leave them out"
        ) from None
    return ids


def check_prompts(shards_dir: Path, prompts: Iterable[str]) -> None:
    """Raises ValueError now for a sample prompt that would fail after the training."""
    tokenizer = Tokenizer.from_file(str(shards_dir / "tokenizer" / "tokenizer.json"))
    for prompt in prompts:
        try:
            encode_prompt(tokenizer, prompt)
        except ValueError as error:
            raise ValueError(f"evaluation.prompts: {error}") from None


def choose_token(logits: np.ndarray, *, temperature: float, top_k: int, random: np.random.Generator) -> int:
    """Pick from fp32 [vocab]: the likeliest at temperature 0, else sampled from the `top_k` likeliest (0: all)."""
    if temperature == 0:
        return int(logits.argmax())
    candidates = np.arange(len(logits))
    if 0 < top_k < len(logits):
        candidates = np.sort(np.argpartition(logits, -top_k)[-top_k:])
    scaled = logits[candidates].astype(np.float64) / temperature
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    chosen = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(candidates[min(chosen, len(candidates) - 1)])
