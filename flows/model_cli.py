"""`shardline lineage|generate|serve`: what is done with a registered model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from flows.tables import print_pairs


def add_model_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    lineage = command("lineage", _lineage, "from a model version back to run, code, data and checkpoint", "MODEL@ALIAS")
    lineage.add_argument("--json", action="store_true", help="one JSON object on stdout")
    generate = command("generate", _generate, "print text from a registered model", "MODEL@ALIAS", "PROMPT")
    generate.add_argument("--tokens", type=int, default=100)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--top-k", type=int, default=50)
    generate.add_argument("--seed", type=int, default=1337)
    serve = command("serve", _serve, "serve a registered model over HTTP; follows the alias", "MODEL@ALIAS")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)
    for added in (generate, serve):
        help = "inference.field=value" + (", serving.field=value" if added is serve else "")
        added.add_argument("overrides", nargs="*", metavar="section.field=value", help=help)


def _lineage(options: argparse.Namespace) -> None:
    from tasks.places import home, tracking_uri
    from tasks.registry import lineage

    found = lineage(options.model, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    if options.json:
        print(json.dumps(found))
        return
    from tasks.overrides import flattened

    print_pairs(f"where {options.model} comes from", [(key, str(value)) for key, value in flattened(found)])


def _generate(options: argparse.Namespace) -> None:
    from flows.presets import serve_config
    from tasks.engine import open_engine
    from tasks.places import home, tracking_uri
    from tasks.registry import resolve

    inference = serve_config(options.overrides).inference
    model = resolve(options.model, tracking_uri=tracking_uri(), cache_dir=home() / "models")
    engine = open_engine(model.export_dir, inference)
    pieces = engine.stream(
        options.prompt,
        new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    engine.close()


def _serve(options: argparse.Namespace) -> None:
    from flows.presets import serve_config
    from tasks.places import home, tracking_uri
    from tasks.serve import serve

    config = serve_config(options.overrides)

    serve(
        options.model,
        host=options.host,
        port=options.port,
        tracking_uri=tracking_uri(),
        cache_dir=home() / "models",
        servers_dir=home() / "servers",
        config=config,
    )
