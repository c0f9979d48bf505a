"""Generates text from an exported model with ONNX Runtime; of Shardline it imports only the encoder of text.

Each registered model version contains a copy of both files; `shardline generate`, the server and the pyfunc all use
them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from training.tokenizer.text_encoder import TextEncoder, check_tokens

logger = logging.getLogger(__name__)

# New text is decoded together with this many tokens before it: some decoders (SentencePiece's) drop the
# space before the first token they see, and byte-level ones need all tokens of a character that spans several.
ANCHOR_TOKENS = 8
MAX_WINDOW = 32  # maximum number of tokens that are decoded again for each new one
INCOMPLETE = "\ufffd"
PAST = "past_key_values."
NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
TIMED_TOKENS = 64  # of a text, so that its time does not depend on how many more a client asks for
CHUNK_TOKENS = 128  # of a prompt that the model reads in one call
SCORED_TOKENS = 256  # whose logits are in memory at the same time: 32 MiB with a vocabulary of 32,768
# How long an idle thread spins before it sleeps. It outlasts most operators that run on one thread, so that a decoding
# step of a small model takes 0.63 times as long as with no spinning; docs/serving.md says what it costs beside others.
SPIN_US = 20
MAX_GRAMMAR_CHARS = 250_000  # 20,000 alternatives
CHECKED_TOKENS = 1000  # of those with which a grammar lets every text begin
MIN_TEMPERATURE = 1e-5  # below it the likeliest token is taken, as in vLLM: logits / temperature would overflow


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, and the conditions that end a text. Raises ValueError for values out of range."""

    new_tokens: int = 64  # maximum number of new tokens
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 50  # sample from the k likeliest tokens; 0: from all
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities add up to this
    seed: int = 1337
    stop_at_end: bool = True  # end the text at the token that ends a document
    stop: tuple[str, ...] = ()  # end the text before the first of these texts
    presence_penalty: float = 0.0  # subtracted from the logit of each token that is in the new text
    frequency_penalty: float = 0.0  # subtracted once for each time that the token is in the new text
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    logprobs: int | None = None  # report each token's log-probability, and those of this many likeliest tokens
    grammar: Mapping[str, Any] = field(default_factory=dict)  # {"json": SCHEMA} or {"regex": PATTERN} of the new text

    def __post_init__(self) -> None:
        if min(self.new_tokens, self.top_k, self.seed) < 0 or not 0 <= self.temperature < math.inf:  # also refuses NaN
            raise ValueError(
                f"new_tokens = {self.new_tokens}, temperature = {self.temperature:g}, top_k = {self.top_k}, "
                f"seed = {self.seed}: none may be below 0 or infinite"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p:g}: give a probability above 0 and at most 1")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end every text before it begins: leave it out")

    @property
    def is_plain(self) -> bool:
        """Return whether tokens depend only on temperature, top_k, top_p and seed, without log-probabilities."""
        adjusted = self.presence_penalty or self.frequency_penalty or self.logit_bias or self.grammar
        return self.logprobs is None and not adjusted


class GrammarFailed(ValueError):
    """The text cannot follow its grammar any further: the matcher gave up, for example at one of its limits."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability by the model alone: before temperature, penalties, bias and grammar."""

    token: int
    logprob: float | None  # None: no token precedes it
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and their log-probabilities, highest first


class TokenChooser:
    """Chooses the tokens of one text. If `sampling` is plain, all other settings cost the check of one flag."""

    def __init__(self, sampling: Sampling, matcher: Any = None) -> None:
        self.sampling, self.random = sampling, np.random.default_rng(sampling.seed)
        self.logprobs: list[TokenLogprob] = []  # of the tokens so far, if sampling.logprobs
        self._is_plain, self._matcher = sampling.is_plain, matcher
        self._counts: Counter[int] = Counter()

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token, chosen from fp32 logits [vocab]. Raises GrammarFailed if the grammar allows none."""
        if self._is_plain:
            return choose_token(logits, self.sampling, random=self.random)
        token = choose_token(self._adjusted(logits), self.sampling, random=self.random)
        self._counts[token] += 1
        if self._matcher:
            self._matcher.consume_token(token)
            _check_matcher(self._matcher, self.sampling.grammar)
        if self.sampling.logprobs is not None:
            self.logprobs.append(_with_likeliest(_log_softmax(logits), token, top=self.sampling.logprobs))
        return token

    def _adjusted(self, logits: np.ndarray) -> np.ndarray:
        logits, asked = logits.copy(), self.sampling
        if asked.logit_bias:
            logits[list(asked.logit_bias)] += np.array(list(asked.logit_bias.values()), dtype=np.float32)
        if self._counts and (asked.presence_penalty or asked.frequency_penalty):
            counts = np.array(list(self._counts.values()), dtype=np.float32)
            logits[list(self._counts)] -= asked.presence_penalty + asked.frequency_penalty * counts
        if self._matcher:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            _check_matcher(self._matcher, asked.grammar)
            allowed = np.unpackbits(bits, bitorder="little", count=len(logits)).astype(bool)
            logits[~allowed] = -np.inf
        return logits


class Compiled(dict[str, Any]):
    """A grammar with its matcher, an llguidance.LLMatcher, which tells which tokens it allows next."""

    def __init__(self, grammar: Mapping[str, Any], matcher: Any) -> None:
        super().__init__(grammar)
        self.matcher = matcher


class Grammars:
    """Compiles the grammars of texts that one tokenizer encodes; `end_id`: the token that ends a document."""

    def __init__(self, tokenizer: Tokenizer, end_id: int) -> None:
        self.tokenizer, self.end_id = tokenizer, end_id

    def matcher(self, grammar: Mapping[str, Any]) -> Any:
        """Return a matcher for one text, of a grammar that may be compiled already. Raises what `compile` raises."""
        compiled = grammar if isinstance(grammar, Compiled) else self.compile(grammar)
        return compiled.matcher.deep_copy()

    def source(self, grammar: Mapping[str, Any]) -> str:
        """Return a grammar as JSON. Raises ValueError for one that is too large."""
        try:
            source = json.dumps(grammar)
        except RecursionError:
            raise ValueError("text cannot be constrained by this json: it is nested too deeply") from None
        if len(source) > MAX_GRAMMAR_CHARS:
            raise ValueError(
                f"text cannot be constrained by this {next(iter(grammar))} of {len(source):,} characters: simplify it "
                f"to {MAX_GRAMMAR_CHARS:,} characters at most"
            )
        return source

    def compile(self, grammar: Mapping[str, Any]) -> Compiled:
        """Return the grammar with its matcher, which no limit keeps from taking minutes.

        Raises ValueError for an invalid grammar, and for one on which the matcher gives up before the first choice.
        """
        grammar, tokenizer = json.loads(self.source(grammar)), self._tokenizer
        from llguidance import LLMatcher

        kind = next(iter(grammar))
        try:
            if kind == "json":
                # Without this option a model may write endless spaces between two values.
                rules = LLMatcher.grammar_from_json_schema(grammar["json"], overrides={"whitespace_flexible": False})
            else:
                rules = LLMatcher.grammar_from_regex(grammar["regex"])
            matcher = LLMatcher(tokenizer, rules, log_level=0)
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            beginning = matcher.deep_copy()
            beginning.consume_tokens(beginning.compute_ff_tokens()[:CHECKED_TOKENS])
            beginning.compute_bitmask()
            _check_matcher(beginning, grammar)
        except GrammarFailed:
            raise
        except ValueError as error:  # for a grammar that is wrong, or holds what llguidance's JSON cannot
            raise ValueError(f"text cannot be constrained by this {kind}: {str(error)[:2000]}") from None
        return Compiled(grammar, matcher)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise ValueError(
                "text by a JSON schema or a regular expression needs llguidance, which is not installed here: "
                "install the extra `grammar`"
            ) from None
        return LLTokenizer(self.tokenizer.to_str(), eos_token=self.end_id)


def _check_matcher(matcher: Any, grammar: Mapping[str, Any]) -> None:
    """Raise GrammarFailed if the matcher is in its error state, in which it would end the text as if it were whole."""
    if matcher.is_error():
        why = matcher.get_error().partition("\n")[0]
        raise GrammarFailed(
            f"text cannot be constrained by this {next(iter(grammar))} (llguidance: {why}): simplify it; hundreds of "
            "optional properties, or a property that requires itself, are more than it can match"
        )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax over the last axis, computed in fp64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _with_likeliest(logprobs: np.ndarray, token: int, *, top: int) -> TokenLogprob:
    likeliest = (
        np.argpartition(logprobs, -top)[-top:] if 0 < top < len(logprobs) else np.arange(len(logprobs) * (top > 0))
    )
    ordered = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]
    return TokenLogprob(token, float(logprobs[token]), tuple((int(each), float(logprobs[each])) for each in ordered))


class Detokenizer:
    """Decodes tokens that arrive one by one, after the tokens `before`, into whole characters."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._window = tokenizer, list(before[-ANCHOR_TOKENS:])
        self._shown = len(self._decode())

    def push(self, token: int) -> str:
        """Add a token; return the text that later tokens cannot change, so without an incomplete character."""
        self._window.append(token)
        text = self._decode()
        settled = max(self._shown, _settled_length(text))
        piece, self._shown = text[self._shown : settled], settled
        if settled == len(text) and len(self._window) > MAX_WINDOW:
            self._window = self._window[-ANCHOR_TOKENS:]
            self._shown = len(self._decode())
        return piece

    def rest(self) -> str:
        """Return the text that was held back, once no more tokens come."""
        return self._decode()[self._shown :]

    def _decode(self) -> str:
        return decode(self._tokenizer, self._window)


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


class TextStream(Iterator[str]):
    """Iterates over the text of token IDs as they arrive, in pieces of whole characters; ends before a stop text.

    `new_tokens`: the number of tokens so far. `finish_reason`: "" until the end, then "length" if all requested
    tokens were generated, else "stop".
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], new_ids: Iterator[int], sampling: Sampling) -> None:
        self.prompt_tokens, self.new_tokens = len(prompt_ids), 0
        self.finish_reason = ""
        self.opened_at = time.perf_counter()
        self.timed_at: float | None = None  # when its last token came, or its TIMED_TOKENS-th, by perf_counter
        self._closed = False
        self._tokenizer, self._ids, self._sampling = tokenizer, new_ids, sampling
        self._anchor = prompt_ids[-ANCHOR_TOKENS:]
        self.logprobs: Sequence[TokenLogprob] = ()  # one per token, if sampling.logprobs is set; the engine fills it
        self._text = self._until_stop(self._pieces()) if sampling.stop else self._pieces()

    def __next__(self) -> str:
        try:
            return next(self._text)
        except StopIteration:
            self._finish()
            raise

    def read(self) -> str:
        """Return the whole text at once."""
        if self._sampling.stop:
            return "".join(self)
        new_ids = list(self._counted())
        self._finish()
        return self._decode([*self._anchor, *new_ids])[len(self._decode(self._anchor)) :]

    def close(self) -> None:
        """Cancel the text; may be called from any thread. A token that is being computed is dropped."""
        self._closed = True
        with contextlib.suppress(ValueError, AttributeError):  # a running generator; an iterator without `close`
            self._ids.close()  # type: ignore[attr-defined]

    def _finish(self) -> None:
        self.finish_reason = self.finish_reason or ("stop" if self.new_tokens < self._sampling.new_tokens else "length")

    def _counted(self) -> Iterator[int]:
        for token in self._ids:
            if self._closed:
                return
            self.new_tokens += 1
            if self.new_tokens <= TIMED_TOKENS:
                self.timed_at = time.perf_counter()
            yield token

    def _pieces(self) -> Iterator[str]:
        text = Detokenizer(self._tokenizer, self._anchor)
        for token in self._counted():
            if piece := text.push(token):
                yield piece
        if rest := text.rest():
            yield rest

    def _until_stop(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yield the text before the first stop text; hold back an end that may be the beginning of a stop text."""
        pending = ""
        for piece in pieces:
            pending += piece
            found = [pending.index(stop) for stop in self._sampling.stop if stop in pending]
            if found:
                self.finish_reason = "stop"
                self.close()
                yield pending[: min(found)]
                return
            kept = max(_overlap(pending, stop) for stop in self._sampling.stop)
            if len(pending) > kept:
                yield pending[: len(pending) - kept]
                pending = pending[len(pending) - kept :]
        if pending:
            yield pending

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)


def _settled_length(text: str) -> int:
    """Return the length of `text` without an incomplete last character, which shows as 3 replacements at most."""
    return max(len(text.rstrip(INCOMPLETE)), len(text) - 3)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def graph_names(precision: str) -> list[str]:
    """Return the files of the decoding graphs, the faster one first; exports of Shardline 0.1 have only the second."""
    suffix = "" if precision == "fp32" else f"_{precision}"
    return [f"batch{suffix}.onnx", f"decode{suffix}.onnx"]


def has_graph(folder: Path, precision: str, *, in_place: bool = False) -> bool:
    return any((folder / name).is_file() for name in graph_names(precision)[: 1 if in_place else 2])


def open_graph(folder: Path, *, precision: str, threads: int) -> onnxruntime.InferenceSession:
    """Open the fastest decoding graph in this precision. Raises ValueError if the export has none."""
    names = graph_names(precision)
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        skipped = json.loads((folder / "export.json").read_text())["skipped"]
        why = next((skipped[name] for name in (*names, "onnx") if name in skipped), "the export was made without it")
        cure = "set inference.engine=torch"
        if precision != "fp32":
            cure = (
                "set inference.precision=fp32, or make a new version with "
                f"`shardline resume RUN train.steps=MORE export.precisions=[fp32,{precision}]`"
            )
        raise ValueError(f"{folder} has no {names[0]} ({why}): {cure}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its warnings are about its own optimizer, its errors are exceptions too
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
    return onnxruntime.InferenceSession(str(found[0]), options, providers=["CPUExecutionProvider"])


def open_cache(session: onnxruntime.InferenceSession, *, rows: int, context: int) -> InPlaceCache | CopiedCache:
    """Return an empty cache for `rows` texts of at most `context` tokens each."""
    in_place = all(tensor.name != "attention_mask" for tensor in session.get_inputs())
    return InPlaceCache(session, rows=rows, context=context) if in_place else CopiedCache(session, rows=rows)


def empty_cache(session: onnxruntime.InferenceSession, *, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """Return zeros for the keys and values of each layer, by tensor name without the prefix."""
    return {
        tensor.name.removeprefix(PAST): np.zeros((rows, tensor.shape[1], tokens, tensor.shape[3]), NUMPY[tensor.type])
        for tensor in session.get_inputs()
        if tensor.name.startswith(PAST)
    }


class InPlaceCache:
    """Keys and values of several texts, to which batch.onnx appends in place. For one thread at a time.

    Each row of the buffers has room for a whole context; the system allocates memory only as it is written.
    """

    def __init__(self, session: onnxruntime.InferenceSession, *, rows: int, context: int) -> None:
        self.session = session
        self.vocab = session.get_outputs()[0].shape[2]
        self.buffers = empty_cache(session, rows=rows, tokens=context)
        self._steps: dict[int, _Call] = {}  # by number of rows; kept, because binding takes as long as a small step

    def read(self, row: int, ids: Sequence[int], start: int) -> np.ndarray:
        """Append `ids` to the first `start` tokens of a row; return the fp32 logits after each ID, [tokens, vocab]."""
        call = _Call(self, slice(row, row + 1), tokens=len(ids))
        found: np.ndarray = call.run([ids], np.arange(start, start + len(ids)))[0]
        return found

    def step(self, ids: Sequence[int], starts: Sequence[int]) -> np.ndarray:
        """Append one token to each of the first rows, which have `starts` tokens; return fp32 logits [rows, vocab].

        The next step with the same number of rows overwrites the returned array.
        """
        rows = len(ids)
        if rows not in self._steps:
            self._steps[rows] = _Call(self, slice(0, rows), tokens=1)
        found: np.ndarray = self._steps[rows].run(np.array(ids)[:, None], np.array(starts)[:, None])[:, 0]
        return found

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` of the row `source` to the row `target`."""
        for buffer in self.buffers.values():
            buffer[target, :, :tokens] = buffer[source, :, :tokens]


class _Call:
    """A call of the graph whose inputs and outputs are bound to buffers, so that it allocates and copies nothing."""

    def __init__(self, cache: InPlaceCache, rows: slice, *, tokens: int) -> None:
        shape = (rows.stop - rows.start, tokens)
        self.session, self.binding = cache.session, cache.session.io_binding()
        self.ids, self.positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.logits = np.empty((*shape, cache.vocab), np.float32)
        self._bind(self.binding.bind_input, "input_ids", self.ids)
        self._bind(self.binding.bind_input, "position_ids", self.positions)
        self._bind(self.binding.bind_output, "logits", self.logits)
        for name, buffer in cache.buffers.items():
            self._bind(self.binding.bind_input, f"{PAST}{name}", buffer[rows])
            self._bind(self.binding.bind_output, f"present.{name}", buffer[rows])

    def run(self, ids: Any, positions: Any) -> np.ndarray:
        self.ids[:], self.positions[:] = ids, positions
        self.session.run_with_iobinding(self.binding)
        return self.logits

    @staticmethod
    def _bind(bind: Any, name: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class CopiedCache:
    """The counterpart of InPlaceCache for decode.onnx, which copies the cache at each step: it steps each row alone."""

    def __init__(self, session: onnxruntime.InferenceSession, *, rows: int) -> None:
        self.session = session
        empty = empty_cache(session, rows=1, tokens=0)
        self.names, self.rows = list(empty), [list(empty.values()) for _ in range(rows)]

    def read(self, row: int, ids: Sequence[int], start: int) -> np.ndarray:
        past = [part[:, :, :start] for part in self.rows[row]]
        feed = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, start + len(ids)), np.int64),
            "position_ids": np.arange(start, start + len(ids), dtype=np.int64)[None],
        }
        feed |= {f"{PAST}{name}": part for name, part in zip(self.names, past, strict=True)}
        logits, *self.rows[row] = self.session.run(None, feed)
        found: np.ndarray = logits[0]
        return found

    def step(self, ids: Sequence[int], starts: Sequence[int]) -> np.ndarray:
        return np.stack([self.read(row, [i], start)[0] for row, (i, start) in enumerate(zip(ids, starts, strict=True))])

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.rows[target] = [part[:, :, :tokens] for part in self.rows[source]]


class TextGenerator:
    """An open export folder: its ONNX session and its tokenizer. Safe to call from several threads.

    `threads`: of ONNX Runtime within an operator; 0: one per core. Raises ValueError if the folder holds no export, or
    the export of a masked model.
    """

    concurrent = 2  # one text uses all cores; with two, a short text need not wait for a long one
    ready = True

    def __init__(self, export_dir: Path | str, *, precision: str = "fp32", threads: int = 0) -> None:
        folder = Path(export_dir)
        self.context, self.end_ids, self.encoder = open_export(folder)
        self.tokenizer = self.encoder.tokenizer
        self.grammars = Grammars(self.tokenizer, self.end_ids[0])
        self.session = open_graph(folder, precision=precision, threads=threads)

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        """Return the text after `prompt`. `sampling`: the fields of Sampling; equal values give equal text.

        The model sees the last `context` tokens of a prompt. When the context is full, it continues from its last half.
        """
        return self.stream(prompt, **sampling).read()

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """Return what `generate` does, as a stream of pieces. Raises ValueError in this call, not during reading."""
        prompt_ids, chooser = self.encode(prompt), self.chooser(Sampling(**sampling))
        stream = TextStream(self.tokenizer, prompt_ids, self._new_ids(prompt_ids, chooser), chooser.sampling)
        stream.logprobs = chooser.logprobs
        return stream

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        """Return each ID's log-probability after the IDs before it, and the `top` likeliest tokens at its place."""
        if len(ids) > self.context + 1:
            raise ValueError(
                f"{len(ids)} tokens cannot be scored: the model sees {self.context}, so send {self.context + 1} at most"
            )
        scores = [TokenLogprob(token, None) for token in ids[:1]]
        cache = open_cache(self.session, rows=1, context=self.context)
        for start in range(0, len(ids) - 1, SCORED_TOKENS):
            read = ids[start : min(start + SCORED_TOKENS, len(ids) - 1)]
            logits = cache.read(0, read, start)
            following = ids[start + 1 : start + 1 + len(read)]
            scores += [_with_likeliest(_log_softmax(row), i, top=top) for row, i in zip(logits, following, strict=True)]
        return scores

    def wait_ready(self, timeout_s: float) -> bool:
        return self.ready

    def close(self) -> None:
        """Do nothing: sessions are freed with their last reference."""

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the prompt's token IDs; for an empty prompt the end token, after which a new document starts."""
        return self.encoder.encode(prompt) or [self.end_ids[0]]

    def chooser(self, sampling: Sampling) -> TokenChooser:
        """Return a chooser for one text. Raises ValueError for tokens outside the vocabulary or an invalid grammar."""
        check_tokens(self.tokenizer, sampling.logit_bias)
        return TokenChooser(sampling, self.grammars.matcher(sampling.grammar) if sampling.grammar else None)

    def _new_ids(self, prompt_ids: list[int], chooser: TokenChooser) -> Iterator[int]:
        sampling = chooser.sampling
        cache = open_cache(self.session, rows=1, context=self.context)
        seen, read = prompt_ids[-self.context :], 0
        for _ in range(sampling.new_tokens):
            logits = self._logits(cache, seen, read)
            token = chooser.choose(logits)
            if token in self.end_ids and sampling.stop_at_end:
                return
            yield token
            read = len(seen)
            seen.append(token)
            if len(seen) > self.context:  # the model was not trained on positions beyond its context
                seen, read = shortened(seen, self.context), 0

    def _logits(self, cache: InPlaceCache | CopiedCache, seen: list[int], read: int) -> np.ndarray:
        """Return fp32 logits [vocab] after the tokens `seen`, of which the first `read` are in the cache."""
        for start in range(read, len(seen), CHUNK_TOKENS):
            chunk = seen[start : start + CHUNK_TOKENS]
            logits = cache.step(chunk, [start]) if len(chunk) == 1 else cache.read(0, chunk, start)
        last: np.ndarray = logits[-1]
        return last


def shortened(ids: list[int], context: int) -> list[int]:
    """Return the last half of a full context, to continue from: a shift by one token would recompute all."""
    return ids[-max(1, context // 2) :]


def open_export(folder: Path) -> tuple[int, tuple[int, ...], TextEncoder]:
    """Return context in tokens, the tokens that end a text, of which the first ends documents, and encoder.

    Raises ValueError for no export or a masked model.
    """
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
    end_ids = tuple(dict.fromkeys((export["end_id"], *export["end_ids"])))
    return export["context"], end_ids, TextEncoder(folder, export["text_encoding"])


def choose_token(logits: np.ndarray, sampling: Sampling, *, random: np.random.Generator) -> int:
    """Choose from fp32 logits [vocab]: the likeliest token at temperature 0, else a sample from top_k and top_p."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    candidates = np.arange(len(logits))
    if 0 < sampling.top_k < len(logits):
        candidates = np.sort(np.argpartition(logits, -sampling.top_k)[-sampling.top_k :])
    scaled = logits[candidates].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    if sampling.top_p < 1:
        weights = _nucleus(weights, sampling.top_p)
    cumulative = np.cumsum(weights)
    chosen = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
    return int(candidates[min(chosen, len(candidates) - 1)])


def _nucleus(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Keep the fewest largest weights that sum to `top_p` of all; set the others to 0 (Holtzman et al. 2019, 3.1)."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = order[before < top_p * weights.sum()]
    left: np.ndarray = np.zeros_like(weights)
    left[kept] = weights[kept]
    return left
