"""OpenVINO GenAI with continuous batching; CTranslate2 or ONNX Runtime GenAI with waiting requests in one batch.

python -m benchmarks.baselines.runtime_server openvino|ctranslate2|genai FOLDER PORT
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

ROWS = 16


class Request(BaseModel):
    prompt: str
    max_tokens: int


Waiting = queue.SimpleQueue[tuple[Request, Future[str]]]


def openvino(folder: Path, waiting: Waiting) -> None:
    """Add each request at the next step. Products are in fp32, or of int8 weights; other settings are defaults."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = ROWS, 1
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    running: dict[int, tuple[Any, Request, Future[str]]] = {}
    number = 0
    while True:
        while not running or not waiting.empty():
            request, future = waiting.get()
            settings = genai.GenerationConfig(max_new_tokens=request.max_tokens, do_sample=False, ignore_eos=True)
            running[number] = (pipeline.add_request(number, request.prompt, settings), request, future)
            number += 1
        pipeline.step()
        for key, (handle, request, future) in list(running.items()):
            if handle.get_status() == genai.GenerationStatus.FINISHED:
                ids = handle.read_all()[0].generated_ids
                assert len(ids) == request.max_tokens, f"{len(ids)} tokens, not {request.max_tokens}"
                future.set_result(pipeline.get_tokenizer().decode(ids))
                del running[key]


def ctranslate2(folder: Path, waiting: Waiting) -> None:
    """Make one batch of all waiting requests; later ones wait until it is done, as CTranslate2 cannot add them."""
    import ctranslate2
    from tokenizers import Tokenizer

    kind = "int8" if folder.name.endswith("int8") else "float32"
    generator = ctranslate2.Generator(str(folder), compute_type=kind, intra_threads=len(os.sched_getaffinity(0)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    while True:
        batch = next_batch(waiting)
        prompts = [tokenizer.encode(request.prompt).tokens for request, _ in batch]
        length = max(request.max_tokens for request, _ in batch)
        made = generator.generate_batch(
            prompts, max_length=length, min_length=length, sampling_topk=1, include_prompt_in_result=False
        )
        for (request, future), result in zip(batch, made, strict=True):
            future.set_result(tokenizer.decode(result.sequences_ids[0][: request.max_tokens]))


def genai(folder: Path, waiting: Waiting) -> None:
    """Make one batch of all waiting requests, padded on the right, as its attention expects.

    Its Engine adds requests to a running batch only with paged attention, which its builder (0.18) has for GPUs alone;
    on CPUs it made batches of 4, whatever it was told, and was slower than this.
    """
    import numpy as np
    import onnxruntime_genai
    from tokenizers import Tokenizer

    model = onnxruntime_genai.Model(str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    while True:
        batch = next_batch(waiting)
        prompts = [tokenizer.encode(request.prompt).ids for request, _ in batch]
        width, length = max(map(len, prompts)), max(request.max_tokens for request, _ in batch)
        params = onnxruntime_genai.GeneratorParams(model)
        sizes = {"batch_size": len(batch), "min_length": width + length, "max_length": width + length}
        params.set_search_options(do_sample=False, **sizes)
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(np.array([ids + [0] * (width - len(ids)) for ids in prompts], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        for row, (request, future) in enumerate(batch):
            future.set_result(tokenizer.decode(generator.get_sequence(row)[width : width + request.max_tokens]))


def next_batch(waiting: Waiting) -> list[tuple[Request, Future[str]]]:
    """Return the waiting requests, at most ROWS; wait for the first."""
    batch = [waiting.get()]
    while len(batch) < ROWS and not waiting.empty():
        batch.append(waiting.get())
    return batch


def main() -> None:
    name, folder, port = sys.argv[1:]
    waiting: Waiting = queue.SimpleQueue()
    run: Callable[[Path, Waiting], None] = {"openvino": openvino, "ctranslate2": ctranslate2, "genai": genai}[name]

    def work() -> None:
        try:
            run(Path(folder), waiting)
        except BaseException as error:
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=work, daemon=True).start()
    app = FastAPI()

    @app.post("/generate")
    def complete(request: Request) -> dict[str, str]:
        future: Future[str] = Future()
        waiting.put((request, future))
        return {"text": future.result()}

    uvicorn.run(app, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
