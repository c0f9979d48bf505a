"""Measures tokens per second and latency of servers with 1, 4 and 16 clients, and failed requests in a roll-out.

    python -m benchmarks.serving [--quick] [--plot serving.png]

There are two models: a small one (4M parameters, trained for a few steps) and one of 94M (random
weights). A request has a prompt of about 20 tokens and asks for 64 more (32 with --quick), greedily. All servers of a
model are started first and are idle while another one is measured; in each repetition they take turns, so that a busy
machine affects all of them.
The other servers are what one would use without Shardline: OpenVINO GenAI's continuous batching, CTranslate2 and ONNX
Runtime GenAI behind FastAPI, in fp32 and with int8 weights (`pip install 'shardline[benchmark]'`; those that are not
installed, or cannot run the model, are reported and left out); for the 4M model also `transformers serve` (its
--continuous-batching ends the process at the first request on a CPU, transformers 5.23), a pipeline behind FastAPI and,
without --quick, `mlflow models serve` of MLflow's transformers flavour. Without --quick Shardline's pyfunc in `mlflow
models serve` is measured too, but not compared with the others.
The last line is one JSON object: `tokens_per_s` and `p95_ms` by model, server and clients; `ratio_vs_best_other` by
model and precision, and clients (tokens/s of `shardline serve` over those of the best of the others in that precision,
the median over repetitions); `int8_vs_fp32` by model and clients (tokens/s of `shardline serve`);
`int8_perplexity_increase` of the 4M model on held-out text, as a fraction; `missing`, what was not installed; and
`failed_requests_in_rollout` while the alias of the 4M model moves back and forth under 4 clients, beside 2 whose bodies
are malformed: theirs count as failed where the reply does not say that the request is wrong (4xx).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.serving_models import NAME, RUNTIMES, SIZES, SMALL, registry_uri

CLIENTS = (1, 4, 16)
START_S = 240
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return "
MALFORMED = (b"{", b"\xff", b"[]", b'{"model": 1}', b'{"model": "x", "prompt": {"a": 1}, "temperature": "hot"}')
OURS = "shardline serve"
PYFUNC = "mlflow models serve, our pyfunc"  # not compared with others
TITLES = {"openvino": "OpenVINO GenAI", "ctranslate2": "CTranslate2", "genai": "ONNX Runtime GenAI"}


@dataclass
class Server:
    """A server to measure. `body(prompt, new_tokens)`: the JSON of a request."""

    name: str
    command: list[str]
    path: str
    body: Any
    precision: str = "fp32"
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def client(self, *, timeout_s: float = 60) -> httpx.Client:
        """Return a client that keeps one connection to the server."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=timeout_s, trust_env=False)

    def ask(self, client: httpx.Client, prompt: str, new_tokens: int) -> None:
        reply = client.post(self.path, json=self.body(prompt, new_tokens))
        if reply.status_code != 200:
            raise RuntimeError(f"{self.name}: {reply.status_code} {reply.content[:500]!r}")


def contestants(folder: Path, *, size: str, quick: bool) -> list[Server]:
    export, ours = str(folder / "version" / "artifacts" / "export"), [sys.executable, "-m", "flows.cli", "serve"]
    home = {"MLFLOW_TRACKING_URI": registry_uri(folder), "SHARDLINE_HOME": str(folder / "home")}
    scripts = Path(sys.executable).parent
    hugging_face = [str(scripts / "transformers"), "serve", export, "--device", "cpu", "--port", "PORT"]
    mlflow = [str(scripts / "mlflow"), "models", "serve", "--env-manager", "local", "--port", "PORT", "--model-uri"]

    def completion(prompt: str, new_tokens: int, model: str = NAME) -> dict[str, Any]:
        return {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}

    def hugging_face_completion(prompt: str, new_tokens: int) -> dict[str, Any]:
        return completion(prompt, new_tokens, model=export)

    def flavour(prompt: str, new_tokens: int) -> dict[str, Any]:
        return {"inputs": [prompt], "params": {"max_new_tokens": new_tokens, "do_sample": False}}

    def pyfunc(prompt: str, new_tokens: int) -> dict[str, Any]:
        columns = {"columns": ["prompt"], "data": [[prompt]]}
        return {"dataframe_split": columns, "params": {"new_tokens": new_tokens, "temperature": 0.0}}

    def simple(prompt: str, new_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": new_tokens}

    ref, v1 = [f"{NAME}@champion", "--port", "PORT", "serving.poll_s=0.2"], "/v1/completions"
    servers = []
    missing = set(json.loads((folder / "missing.json").read_text()))
    for precision in ("fp32", "int8"):
        engine = ["inference.engine=onnx", f"inference.precision={precision}"]
        servers.append(Server(f"{OURS}, {precision}", [*ours, *ref, *engine], v1, completion, precision, home))
        for name in sorted(RUNTIMES.keys() - missing):
            made = str(folder / f"{name}-{precision}")
            command = [sys.executable, "-m", "benchmarks.baselines.runtime_server", name, made, "PORT"]
            servers.append(Server(f"{TITLES[name]}, {precision}", command, "/generate", simple, precision))
    if size != SMALL:
        return servers
    plain = [sys.executable, "-m", "benchmarks.baselines.pipeline_server", export, "PORT"]
    servers += [
        Server("transformers serve", hugging_face, v1, hugging_face_completion),
        Server("pipeline + FastAPI", plain, "/generate", simple),
    ]
    if quick:
        return servers
    return [
        *servers,
        Server("mlflow models serve", [*mlflow, str(folder / "transformers")], "/invocations", flavour),
        Server(PYFUNC, [*mlflow, str(folder / "pyfunc")], "/invocations", pyfunc),
    ]


@contextmanager
def running(server: Server, folder: Path) -> Iterator[None]:
    """Run the server inside the block; its output goes to FOLDER/NAME.log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        server.port = free.getsockname()[1]
    command = [part.replace("PORT", str(server.port)) if part == "PORT" else part for part in server.command]
    log = folder / f"{server.name.replace(' ', '-')}.log"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # MLflow calls uvicorn by name
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PATH": path} | server.environment
    with log.open("w") as output:
        server.process = process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield
        finally:  # ends the process group, because MLflow's server is a child of its command
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(server: Server, folder: Path, *, new_tokens: int) -> None:
    """Wait until the server has answered a whole request. Raises RuntimeError if it does not in START_S."""
    deadline, why = time.monotonic() + START_S, ""
    while time.monotonic() < deadline and server.process and server.process.poll() is None:
        try:
            with server.client() as client:
                server.ask(client, PROMPT, new_tokens)
            return
        except (httpx.HTTPError, RuntimeError) as error:
            why = str(error)
            time.sleep(0.5)
    log = (folder / f"{server.name.replace(' ', '-')}.log").read_text()[-2000:]
    raise RuntimeError(f"{server.name} does not answer: {why}\n{log}")


def load(server: Server, clients: int, *, new_tokens: int, window_s: float) -> tuple[float, list[float]]:
    """Return tokens per second, and the seconds of each request; clients send one after the other for `window_s`."""
    barrier, deadline = threading.Barrier(clients + 1), 0.0

    def client(number: int) -> list[tuple[float, float]]:
        done: list[tuple[float, float]] = []
        with server.client(timeout_s=600) as http:
            barrier.wait()
            while not done or time.perf_counter() < deadline:
                began = time.perf_counter()
                server.ask(http, f"# {number} {len(done)}\n{PROMPT}", new_tokens)
                done.append((began, time.perf_counter()))
        return done

    with ThreadPoolExecutor(clients) as pool:
        requesting = [pool.submit(client, number) for number in range(clients)]
        began = time.perf_counter()
        deadline = began + window_s
        barrier.wait()
        done = [request for one in requesting for request in one.result()]
    seconds = max(ended for _, ended in done) - began
    return len(done) * new_tokens / seconds, [ended - start for start, ended in done]


def rollout(server: Server, folder: Path, *, moves: int) -> tuple[int, int]:
    """Move the alias back and forth under 4 clients, and 2 that send malformed bodies, and wait for each switch; return
    (requests, failed requests).
    """
    from mlflow.tracking import MlflowClient

    client, finished = MlflowClient(registry_uri(folder), registry_uri(folder)), threading.Event()

    def served(http: httpx.Client) -> int:
        return int(http.get("/health").json()["version"])

    def hammer(_: int) -> tuple[int, int]:
        num_requests = failed = 0
        with server.client() as http:
            while not finished.is_set():
                num_requests += 1
                try:
                    server.ask(http, PROMPT, 16)
                except (httpx.HTTPError, RuntimeError):
                    failed += 1
        return num_requests, failed

    def mistake(_: int) -> tuple[int, int]:
        statuses: list[int] = []
        with server.client() as http:
            while not finished.wait(0.01):
                for body in MALFORMED:
                    reply = http.post(server.path, content=body, headers={"Content-Type": "application/json"})
                    statuses.append(reply.status_code)
        return len(statuses), sum(not 400 <= status < 500 for status in statuses)

    with server.client() as http, ThreadPoolExecutor(6) as pool:
        hammering = [pool.submit(hammer, number) for number in range(4)]
        hammering += [pool.submit(mistake, number) for number in range(2)]
        for move in range(moves):
            version = 2 - move % 2
            client.set_registered_model_alias(NAME, "champion", str(version))
            deadline = time.monotonic() + 60
            while served(http) != version:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"version {version} is not served a minute after the alias moved")
                time.sleep(0.02)
        finished.set()
        counts = [one.result() for one in hammering]
    return sum(num_requests for num_requests, _ in counts), sum(failed for _, failed in counts)


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    found = [measure_model(folder / size, size=size, quick=quick) for size in SIZES]
    perplexity = json.loads((folder / SMALL / "quality.json").read_text())
    together: dict[str, Any] = {}
    for of_model in found:
        for key, value in of_model.items():
            together[key] = together.get(key, {}) | value if isinstance(value, dict) else value
    return together | {
        "int8_perplexity_increase": round(perplexity["int8"] / perplexity["fp32"] - 1, 5),
        "perplexity": {name: round(value, 2) for name, value in perplexity.items()},
        "cores": len(os.sched_getaffinity(0)),
    }


def measure_model(folder: Path, *, size: str, quick: bool) -> dict[str, Any]:
    new_tokens, window_s, repetitions = (32, 1.0, 3) if quick else (64, 5.0, 3)
    servers = contestants(folder, size=size, quick=quick)
    speeds: dict[str, dict[int, list[float]]] = {one.name: {n: [] for n in CLIENTS} for one in servers}
    latencies: dict[str, dict[int, list[float]]] = {one.name: {n: [] for n in CLIENTS} for one in servers}
    missing: dict[str, str] = json.loads((folder / "missing.json").read_text())
    result: dict[str, Any] = {"new_tokens": new_tokens, "repetitions": repetitions, "missing": missing}
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(running(server, folder))
        for server in list(servers):
            try:
                wait_for(server, folder, new_tokens=new_tokens)
            except RuntimeError as error:
                if not server.name.startswith(tuple(TITLES.values())):
                    raise
                missing[f"{server.name} ({size})"] = str(error)[-500:]
                servers.remove(server)
        for _ in range(repetitions):
            for clients in CLIENTS:
                for server in servers:
                    speed, seconds = load(server, clients, new_tokens=new_tokens, window_s=window_s)
                    speeds[server.name][clients].append(speed)
                    latencies[server.name][clients] += seconds
        if size == SMALL:
            num_requests, failed = rollout(servers[0], folder, moves=2 if quick else 10)
            result |= {"failed_requests_in_rollout": failed, "requests_in_rollout": num_requests}

    def ratio(clients: int, name: str, others: list[str]) -> float:
        rows = zip(*(speeds[one][clients] for one in (name, *others)), strict=True)
        return round(statistics.median(ours / max(best) for ours, *best in rows), 2)

    def others(precision: str) -> list[str]:
        names = [one.name for one in servers if one.precision == precision and one.name != PYFUNC]
        return [name for name in names if not name.startswith(OURS)]

    speeds = {one.name: speeds[one.name] for one in servers}
    return result | {
        "ratio_vs_best_other": {
            f"{size} {precision}": {str(n): ratio(n, f"{OURS}, {precision}", others(precision)) for n in CLIENTS}
            for precision in ("fp32", "int8")
            if others(precision)
        },
        "int8_vs_fp32": {size: {str(n): ratio(n, f"{OURS}, int8", [f"{OURS}, fp32"]) for n in CLIENTS}},
        "tokens_per_s": {
            size: {name: {str(n): round(statistics.median(speeds[name][n])) for n in CLIENTS} for name in speeds}
        },
        **{
            f"p{percent}_ms": {
                size: {
                    name: {str(n): round(quantile(latencies[name][n], percent) * 1000, 1) for n in CLIENTS}
                    for name in speeds
                }
            }
            for percent in (50, 95, 99)
        },
    }


def quantile(values: list[float], percent: int) -> float:
    """Return the smallest value that `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def show(result: dict[str, Any]) -> None:
    for size, of_model in result["tokens_per_s"].items():
        print(f"{size + ' parameters':34}" + "".join(f"{f'{n} clients':>28}" for n in CLIENTS))
        print(f"{'server':34}" + f"{'tokens/s  p50/p95/p99 ms':>28}" * len(CLIENTS))
        for name, speeds in of_model.items():
            cells = []
            for clients, speed in speeds.items():
                times = "/".join(f"{result[f'p{percent}_ms'][size][name][clients]:.0f}" for percent in (50, 95, 99))
                cells.append(f"{f'{speed}  {times}':>28}")
            print(f"{name:34}" + "".join(cells))
    for title, key in (("times the best of the others", "ratio_vs_best_other"), ("int8 over fp32", "int8_vs_fp32")):
        for what, ratios in result[key].items():
            print(f"{title}, {what}: " + ", ".join(f"{clients}: {ratio}" for clients, ratio in ratios.items()))
    for name, why in result["missing"].items():
        print(f"left out {TITLES.get(name, name)}: {why}")
    print(f"int8: perplexity of the {SMALL} model {100 * result['int8_perplexity_increase']:+.3f}%")
    print(f"roll-out: {result['failed_requests_in_rollout']} of {result['requests_in_rollout']} requests failed")


def plot(path: Path, result: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(SIZES), 2, figsize=(12, 8.4), squeeze=False)
    colours: dict[str, str] = {}
    for (left, right), (size, of_model) in zip(panels, result["tokens_per_s"].items(), strict=True):
        for name, speeds in of_model.items():
            colour = colours.setdefault(name, f"C{len(colours) % 10}")
            style = ("-" if name.startswith(OURS) else "--") + ("s" if "int8" in name else "o")
            left.plot([*speeds], [*speeds.values()], style, label=name, color=colour)
            right.plot([*speeds], [*result["p95_ms"][size][name].values()], style, color=colour)
        left.set(title=f"{size} parameters", xlabel="clients", ylabel="tokens per second", yscale="log")
        right.set(xlabel="clients", ylabel="95% of requests within, ms", yscale="log")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 tokens in windows of 1 s, fewer servers")
    parser.add_argument("--plot", type=Path, help="draw speed and latency to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        # A process of its own makes the models, so that torch and MLflow take no memory when servers are measured.
        making = [sys.executable, "-m", "benchmarks.support.serving_models", scratch]
        making += [] if args.quick else ["--mlflow"]
        if (made := subprocess.run(making, capture_output=True, text=True)).returncode:
            sys.exit(made.stderr)
        result = measure(Path(scratch), quick=args.quick)
    show(result)
    if args.plot:
        plot(args.plot, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
