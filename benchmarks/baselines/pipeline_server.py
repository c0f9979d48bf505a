"""The simplest server: a transformers text-generation pipeline behind FastAPI.

python -m benchmarks.baselines.pipeline_server FOLDER PORT
"""

import sys
import threading

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import pipeline


class Request(BaseModel):
    prompt: str
    max_tokens: int


def main() -> None:
    folder, port = sys.argv[1:]
    generate, lock, app = pipeline("text-generation", model=folder, device="cpu"), threading.Lock(), FastAPI()

    @app.post("/generate")
    def complete(request: Request) -> dict[str, str]:
        with lock:  # a pipeline is not thread-safe
            made = generate(request.prompt, max_new_tokens=request.max_tokens, do_sample=False, return_full_text=False)
        return {"text": made[0]["generated_text"]}

    uvicorn.run(app, port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
