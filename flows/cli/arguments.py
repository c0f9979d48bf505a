"""Arguments that several commands have."""

from __future__ import annotations

from argparse import ArgumentParser


def add_json(*commands: ArgumentParser) -> None:
    for command in commands:
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def add_overrides(command: ArgumentParser, about: str) -> None:
    command.add_argument("overrides", metavar="section.field=value", nargs="*", default=[], help=about)
