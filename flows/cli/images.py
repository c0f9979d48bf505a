"""`shardline image build|push`, for flows/cli/command.py."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_image_commands(commands: Any) -> None:
    """To the `shardline` parser's subparsers."""
    about = "the training image: build it, push it to a registry"
    actions = commands.add_parser("image", help=about, description=about).add_subparsers(
        required=True, metavar="ACTION"
    )
    about = "build infra/train.Dockerfile by the daemon that `docker` would use"
    build = actions.add_parser("build", help=about, description=about)
    build.set_defaults(call=_build)
    build.add_argument("--base", default="", metavar="IMAGE", help="base image (default: NVIDIA's PyTorch image)")
    about = "the Dockerfile's arguments, such as PIP_INDEX_URL=…"
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help=about)
    build.add_argument("--wheels", default="", metavar="FOLDER", help="wheels that pip may take, if no index has them")
    build.add_argument("--ca", default="", metavar="FILE", help="certificates that pip trusts, during the build only")
    build.add_argument("--network", default="", help="network of the build, as docker build has it, e.g. host")
    about = "push it, and print NAME@sha256:… for launch.image"
    push = actions.add_parser("push", help=about, description=about)
    push.set_defaults(call=_push)
    build.add_argument("name", metavar="NAME", nargs="?", default="shardline-train", help="default: shardline-train")
    push.add_argument("name", metavar="REGISTRY/NAME:VERSION")
    for added in (build, push):
        added.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _build(options: argparse.Namespace) -> None:
    from tasks.operations.images import build_image

    image_id = build_image(
        options.name,
        base_image=options.base,
        build_args=options.build_arg,
        wheels=options.wheels,
        ca=options.ca,
        network=options.network,
    )
    print(json.dumps({"name": options.name, "id": image_id}) if options.json else f"{options.name} is {image_id}")


def _push(options: argparse.Namespace) -> None:
    from tasks.operations.images import push_image

    image = push_image(options.name)
    print(json.dumps({"name": options.name, "image": image}) if options.json else image)
