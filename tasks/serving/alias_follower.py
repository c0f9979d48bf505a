"""Keeps the model version that an alias names open for a server; opens the previous version for comparison."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from tasks.inference.engine import Engine
from tasks.inference.open_engine import open_engine
from tasks.registry.models import example_prompt, find_version, parse_ref, replaced_by, resolve
from tasks.serving.bounded_grammars import BoundedGrammars
from tasks.tracking.client import registry_client
from tasks.workspace.bounded_process import BoundedTemplate
from tasks.workspace.locks import Locked, exclusive
from training.config.serving import InferenceConfig
from training.tracking.redaction import without_credentials

logger = logging.getLogger(__name__)

IDLE_S = 300  # the previous version is closed after so many seconds without a request


class TokenTexts(dict[int, str]):
    """Texts of tokens by ID. Each is decoded once, because 20 likeliest tokens are listed with each token of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        """Decode the token after itself, because SentencePiece drops the space before a first token."""
        once, twice = (self.tokenizer.decode([token] * times, skip_special_tokens=False) for times in (1, 2))
        text = self[token] = str(twice[len(once) :])
        return text


class ServedVersion:
    """A model version with an open engine. Once retired, it is closed when its last request has ended."""

    def __init__(self, name: str, version: int, engine: Engine, folder: Path, *, example: str) -> None:
        """`example`: a prompt of the kind of text that it learned from."""
        self.name, self.version, self.engine, self.folder, self.example = name, version, engine, folder, example
        self.loaded_at = int(time.time())
        self._used_at = time.monotonic()
        self._users, self._retired, self._lock = 0, False, threading.Lock()

    def acquire(self) -> bool:
        """Keep the engine open until `release`; return False if the version is retired already."""
        with self._lock:
            self._users += not self._retired
            return not self._retired

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._used_at = time.monotonic()
            self._close_if_unused()

    def retire(self) -> None:
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._users:  # in a thread, because ranks of torch take seconds to end
            threading.Thread(target=self._close, name=f"close version {self.version}").start()

    def _close(self) -> None:
        self.engine.close()
        for bounded in (self.__dict__.get("chat_template"), self.__dict__.get("grammars")):
            if bounded:
                bounded.process.close()

    @cached_property
    def chat_template(self) -> BoundedTemplate:
        """Return the tokenizer's chat template. Raises LookupError if the tokenizer has none."""
        return BoundedTemplate.of_folder(self.folder)

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.engine.tokenizer)

    @cached_property
    def grammars(self) -> BoundedGrammars:
        return BoundedGrammars(self.engine)

    @property
    def can_chat(self) -> bool:
        try:
            return bool(self.chat_template)
        except LookupError:
            return False

    @property
    def idle_s(self) -> float:
        return 0.0 if self._users else time.monotonic() - self._used_at


class AliasFollower:
    """Keeps the version that a reference names, such as NAME@champion, open for requests.

    `load_lock`: a file that a replica locks while it loads another version, so that replicas load one after another.
    """

    def __init__(
        self,
        ref: str,
        *,
        tracking_uri: str,
        cache_dir: Path | None,
        inference: InferenceConfig,
        rows: int,
        load_lock: Path | None = None,
    ) -> None:
        self.ref, self.tracking_uri, self.cache_dir = ref, tracking_uri, cache_dir
        self.inference, self.rows, self.load_lock = inference, rows, load_lock
        self.on_switch: Callable[[ServedVersion], None] = lambda served: None
        self.client = registry_client(tracking_uri)
        self.served = self._load(ref)
        self._previous: ServedVersion | None = None
        self._loading = threading.Lock()

    def _load(self, ref: str) -> ServedVersion:
        model = resolve(ref, tracking_uri=self.tracking_uri, cache_dir=self.cache_dir)
        example = example_prompt(model.records_dir)
        engine = open_engine(model.export_dir, self.inference, rows=self.rows)
        served = ServedVersion(model.name, model.version, engine, model.export_dir, example=example)
        with suppress(LookupError, ValueError):  # of a template; a request for a chat reports it
            served.chat_template.source  # noqa: B018
            engine.encoder.encode_chat("", guard="\0")  # builds a tokenizer in up to 0.7 s; the first chat would wait
        return served

    def refresh(self) -> None:
        """Load another version and switch to it, if the reference now names one and no other replica is loading it."""
        if int(find_version(self.client, self.ref).version) != self.served.version:
            lock = exclusive(self.load_lock) if self.load_lock else nullcontext()
            with suppress(Locked), lock:  # the next poll tries again
                self._switch()
        with self._loading:
            if self._previous and self._previous.idle_s > IDLE_S:
                self._release_previous()

    def _switch(self) -> None:
        before, self.served = self.served, self._load(self.ref)
        self.on_switch(self.served)
        before.retire()
        logger.info("%s names version %d now, which replaces version %d", self.ref, self.served.version, before.version)

    async def follow(self, *, poll_s: float) -> None:
        """Call `refresh` every `poll_s` seconds until cancelled. Whatever fails, the loaded version stays served."""
        last_error: type[Exception] | None = None
        while isinstance(parse_ref(self.ref)[1], str):
            await asyncio.sleep(poll_s)
            try:
                await asyncio.to_thread(self.refresh)
                last_error = None
            except Exception as error:
                if type(error) is not last_error:  # log it once, not at every poll; its text may differ each time
                    last_error = type(error)
                    why = without_credentials(str(error), uri=self.tracking_uri)
                    logger.warning("version %d stays served: cannot follow %s: %s", self.served.version, self.ref, why)

    @contextmanager
    def current(self) -> Iterator[ServedVersion]:
        """Yield the served version, which stays open while the block runs."""
        while not (served := self.served).acquire():  # it was retired meanwhile, so another one is served now
            pass
        try:
            yield served
        finally:
            served.release()

    def number_before(self) -> int | None:
        """Return the version that the served one replaced; None if there is none."""
        return replaced_by(self.client, self.served.name, self.served.version)

    def previous(self) -> ServedVersion:
        """Acquire the version that the served one replaced; the first call opens it. ValueError: there is none."""
        with self._loading:
            number = self.number_before()
            if number is None:
                raise ValueError(f"{self.served.name}/{self.served.version} did not replace another version")
            if self._previous is None or self._previous.version != number:
                self._release_previous()
                self._previous = self._load(f"{self.served.name}/{number}")
            if not self._previous.acquire():
                raise RuntimeError("the previous version was closed by another thread, which does not hold the lock")
            return self._previous

    def _release_previous(self) -> None:
        before, self._previous = self._previous, None
        if before:
            before.retire()

    def close(self) -> None:
        with self._loading:
            self._release_previous()
        self.served.retire()
