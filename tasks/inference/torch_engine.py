"""The engine that runs a model on torch ranks: for GPUs, for several devices, and for any Hugging Face class."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tasks.hardware.machine import device_kind_of, usable_cores
from tasks.inference.engine import EngineDied
from tasks.inference.onnx_generator import Sampling, TextStream, TokenLogprob, open_export
from tasks.inference.torch_ranks import Tokens, TorchRanks
from training.config.serving import InferenceConfig
from training.node.limits import usable_memory_bytes
from training.planner.reasons.checks import check_inference
from training.records.decoding import ROWS, DecodePlan, DecodeRequest

logger = logging.getLogger(__name__)

OTHER_ENGINE = "serve with inference.engine=onnx"


class TorchEngine:
    """Runs an export folder on ranks. Ranks that die are restarted once; meanwhile requests raise EngineDied."""

    grammars = None

    def __init__(self, export_dir: Path | str, inference: InferenceConfig) -> None:
        folder = Path(export_dir)
        self.context, self.end_ids, self.encoder = open_export(folder)
        self.tokenizer = self.encoder.tokenizer
        check_inference(folder, inference)
        self.plan = DecodePlan(
            folder=str(folder.absolute()),
            parallel=inference.parallel,
            degree=inference.degree,
            device_kind=device_kind_of(inference.degree),
            precision=inference.precision,
            context=self.context,
            threads_per_rank=inference.threads or max(1, usable_cores() // inference.degree),
        )
        _check_memory(self.plan)
        copies = 1 if inference.parallel in {"none", "tensor"} else inference.degree
        self.concurrent = ROWS * copies  # requests that are decoded at the same time
        self.numbers = itertools.count()
        self.changed = threading.Condition()  # notified when the ranks have restarted, failed or closed
        self.closed, self.restarted, self.failed, self.why_not = False, False, False, ""
        self.ranks = self._start()

    @property
    def ready(self) -> bool:
        """Return whether requests can be made now; if not, `why_not` has the reason."""
        return self.ranks.alive

    def wait_ready(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.ready or self.closed or self.failed, timeout_s) and self.ready

    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> str:
        return "".join(self.stream(prompt, **sampling))

    def score(self, ids: Sequence[int], *, top: int = 0) -> list[TokenLogprob]:
        raise ValueError(f"the torch engine gives no log-probabilities: {OTHER_ENGINE}")

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> TextStream:
        """Start a text, like TextGenerator.stream; also raises EngineDied, in this call or during reading."""
        params = Sampling(**sampling)
        if not params.is_plain:
            raise ValueError(f"the torch engine has no log-probabilities, penalties, bias or grammar: {OTHER_ENGINE}")
        prompt_ids = self.encoder.encode(prompt) or [self.end_ids[0]]
        request = DecodeRequest(
            number=next(self.numbers),
            ids=tuple(prompt_ids[-self.context :]),
            new_tokens=params.new_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            stop_ids=self.end_ids if params.stop_at_end else (),
        )
        ranks = self.ranks
        try:
            new_ids = NewIds(ranks, request.number, ranks.submit(request))
        except EngineDied as error:
            raise EngineDied(self.why_not or str(error)) from None
        return TextStream(self.tokenizer, prompt_ids, new_ids, params)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.ranks.close()

    def _start(self) -> TorchRanks:
        return TorchRanks(self.plan, on_death=self._restart)

    def _restart(self) -> None:
        """Restart the ranks, but only once: what killed them twice would kill them a third time."""
        restarts = not self.restarted and not self.closed
        if restarts:
            self.restarted, self.why_not = True, "the torch engine's ranks have ended and are being started again"
            logger.warning("%s", self.why_not)
            try:
                self.ranks, self.why_not = self._start(), ""
            except RuntimeError as error:
                restarts, self.why_not = False, f"the torch engine's ranks have ended, and {error}"
        else:
            self.why_not = "the torch engine's ranks have ended twice: see the log, and start the server again"
        with self.changed:
            self.failed = not restarts
            self.changed.notify_all()
        if self.failed:
            logger.error("%s", self.why_not)
        if self.closed:  # the engine was closed while the ranks were being started
            self.ranks.close()


def _check_memory(plan: DecodePlan) -> None:
    """Raise ValueError if the weights do not fit on this host's CPUs: the kernel would end the ranks, or others."""
    if plan.device_kind != "cpu":
        return
    stored = sum(path.stat().st_size for path in Path(plan.folder).glob("*.safetensors"))  # fp32
    copies = plan.degree if plan.parallel == "data" else 1
    needed = copies * stored / (1 if plan.precision in {"auto", "fp32"} else 2)
    free = min(psutil.virtual_memory().available, usable_memory_bytes())
    if needed > free:
        raise ValueError(
            f"the weights of {plan.folder} take {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are "
            "free: run it on a host with more, or on GPUs"
        )


class NewIds(Iterator[int]):
    """Iterates over the token IDs of one request as they arrive; `close` cancels the request, from any thread."""

    def __init__(self, ranks: TorchRanks, number: int, tokens: Tokens) -> None:
        self.ranks, self.number, self.tokens, self.ended = ranks, number, tokens, False

    def __next__(self) -> int:
        token = None if self.ended else self.tokens.get()
        if isinstance(token, int):
            return token
        self.ended = True
        if token is None:
            raise StopIteration
        raise token

    def close(self) -> None:
        self.ranks.cancel(self.number)

    def __del__(self) -> None:  # frees the row of a stream that nobody read to its end
        if not self.ended:
            self.close()
