"""Keeps the model version that an alias names open for a server; opens the previous version for comparison."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

from tasks.inference.engine import Engine
from tasks.inference.open_engine import open_engine
from tasks.registry.models import example_prompt, find_version, parse_ref, resolve
from tasks.registry.tags import REPLACES
from tasks.serving.bounded_grammars import BoundedGrammars
from tasks.tracking.client import registry_client
from tasks.workspace.bounded_process import BoundedTemplate
from tasks.workspace.locks import Locked, exclusive
from training.config.serving import InferenceConfig
from training.tracking.redaction import without_credentials

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")
ANSWER_S = 10.0  # that an answer of MLflow is waited for
OPEN_S = 20.0  # that a request waits for the previous version; it may come again
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
        self.replaces: int | None = None  # the version that it replaced as champion, by its tags
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
        if self._retired and not self._users:  # in a thread, because an engine's process takes seconds to end
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


class RegistryThread:
    """The one thread in which a server asks MLflow and loads versions, so that no request for text waits for MLflow. It
    is a daemon, so that a server ends while MLflow keeps it waiting.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="registry", daemon=True).start()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Return what `call` will return; the event loop may wait for it."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        found = asyncio.wrap_future(future)
        found.add_done_callback(lambda done: done.cancelled() or done.exception())  # which nobody may wait for any more
        return found

    def _run(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


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
        self.registry = RegistryThread()  # in which all below that asks MLflow runs
        self._previous: ServedVersion | None = None
        self._opening: asyncio.Future[ServedVersion] | None = None

    def _load(self, ref: str) -> ServedVersion:
        model = resolve(ref, tracking_uri=self.tracking_uri, cache_dir=self.cache_dir)
        example = example_prompt(model.records_dir)
        engine = open_engine(model.export_dir, self.inference, rows=self.rows)
        served = ServedVersion(model.name, model.version, engine, model.export_dir, example=example)
        served.replaces = _replaces(model.tags)
        with suppress(LookupError, ValueError):  # of a template; a request for a chat reports it
            served.chat_template.source  # noqa: B018
            engine.encoder.encode_chat("", guard="\0")  # builds a tokenizer in up to 0.7 s; the first chat would wait
        return served

    def refresh(self) -> None:
        """Load another version and switch to it, if the reference now names one and no other replica is loading it."""
        self._follow_to(find_version(self.client, self.ref))

    def _follow_to(self, found: ModelVersion) -> None:
        if int(found.version) != self.served.version:
            lock = exclusive(self.load_lock) if self.load_lock else nullcontext()
            with suppress(Locked), lock:  # the next poll tries again
                self._switch()
        else:
            self.served.replaces = _replaces(found.tags)
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
        asked: asyncio.Future[ModelVersion] | None = None
        while isinstance(parse_ref(self.ref)[1], str):
            await asyncio.sleep(poll_s)
            try:
                if asked is None or asked.done():
                    asked = self.registry.run(partial(find_version, self.client, self.ref))
                found = await asyncio.wait_for(asyncio.shield(asked), ANSWER_S)
                await self.registry.run(partial(self._follow_to, found))
                last_error = None
            except Exception as error:
                if type(error) is not last_error:  # log it once, not at every poll; its text may differ each time
                    last_error = type(error)
                    late = f"MLflow has not answered for {ANSWER_S:g} s, or the version before is being loaded"
                    why = without_credentials(str(error) or late, uri=self.tracking_uri)
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

    async def previous(self) -> ServedVersion:
        """Acquire the version that the served one replaced; the first call opens it.

        Raises ValueError if there is none, TimeoutError if it is not open in time.
        """
        number, open_now = self.served.replaces, self._previous
        if number is None:
            raise ValueError(f"{self.served.name}/{self.served.version} did not replace another version")
        if open_now is None or open_now.version != number or not open_now.acquire():
            if self._opening is None or self._opening.done():
                self._opening = self.registry.run(partial(self._open_previous, number))
            open_now = await asyncio.wait_for(asyncio.shield(self._opening), OPEN_S)
            if not open_now.acquire():
                raise TimeoutError
        return open_now

    def _open_previous(self, number: int) -> ServedVersion:
        if self._previous is None or self._previous.version != number:
            self._release_previous()
            self._previous = self._load(f"{self.served.name}/{number}")
        return self._previous

    def _release_previous(self) -> None:
        before, self._previous = self._previous, None
        if before:
            before.retire()

    def close(self) -> None:
        self._release_previous()
        self.served.retire()


def _replaces(tags: Mapping[str, str]) -> int | None:
    return int(tags[REPLACES]) if tags.get(REPLACES) else None
