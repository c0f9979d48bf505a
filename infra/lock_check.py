"""`make lock-check`: checks that pyproject.toml, constraints.txt and the installed packages agree. Exit code 1 if not.

constraints.txt is the lock: a version for each package that `make setup` installs. `make lock` writes it from what is
installed, for example after `pip install --upgrade`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).parent / "project"
PYPROJECT, CONSTRAINTS = PROJECT / "project.toml", PROJECT / "constraints.txt"
EXTRAS = ("train", "orchestrate", "eval", "dev")  # the extras that infra/setup_venv.py installs
TOOLS = ("uv",)  # pinned for infra/setup_venv.py, although no package needs it
WITH_PYTHON = ("pip",)  # pip-audit needs it; python -m venv installs it


def main(*, write: bool = False) -> None:
    text, pins = CONSTRAINTS.read_text(), read_pins(CONSTRAINTS)
    wanted, others = requirements(PYPROJECT)
    if write:
        comments = [line for line in text.splitlines() if line.startswith("#")]
        versions = {name: version for name, (version, _) in needed(wanted).items() if version}
        versions |= {name: Version(pins[name]) for name in TOOLS}
        lines = [f"{name}=={version.public}" for name, version in sorted(versions.items())]
        CONSTRAINTS.write_text("\n".join([*comments, *lines]) + "\n")
        print(f"{CONSTRAINTS.resolve().name}: {len(lines)} packages")
        return
    found = differences(pins, wanted=wanted, others=others)
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(
            f"{len(found)} differences: install the right versions, then run `make lock`, or correct pyproject.toml"
        )
    print(f"{len(pins)} pinned packages are exactly those that pyproject.toml needs, and are installed")


def read_pins(path: Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def requirements(path: Path) -> tuple[list[Requirement], list[Requirement]]:
    """Return the requirements that `make setup` installs, and those of the other extras."""
    project = tomllib.loads(path.read_text())["project"]
    extras = {name: [Requirement(text) for text in texts] for name, texts in project["optional-dependencies"].items()}
    wanted = [Requirement(text) for text in project["dependencies"]]
    wanted += [requirement for name in EXTRAS for requirement in extras[name]]
    return wanted, [requirement for name in extras if name not in EXTRAS for requirement in extras[name]]


def differences(pins: dict[str, str], *, wanted: list[Requirement], others: list[Requirement]) -> list[str]:
    """Return a sentence for each requirement that its pin does not meet, and each missing, wrong or unneeded pin."""
    found = []
    for requirement in (*wanted, *others):
        pin = pins.get(canonicalize_name(requirement.name))
        if pin is not None and not requirement.specifier.contains(pin, prereleases=True):
            found.append(f"{requirement.name}: pinned at {pin}, but pyproject.toml needs {requirement.specifier}")
    installed = needed(wanted)
    for name, (version, exact) in sorted(installed.items()):
        if name not in pins:
            if not exact:
                found.append(f"{name}: installed at {version} and needed, but not pinned in constraints.txt")
        elif version is None:
            found.append(f"{name}: needed, but not installed: make setup")
        elif version.public != Version(pins[name]).public:
            found.append(f"{name}: pinned at {pins[name]}, but installed at {version}")
    stale = sorted({*pins} - {*installed, *TOOLS})
    found += [f"{name}: pinned at {pins[name]}, but nothing needs it" for name in stale]
    return found


def needed(wanted: Iterable[Requirement]) -> dict[str, tuple[Version | None, bool]]:
    """Return package -> installed version or None, for all packages that the requirements need, directly or not.

    With it, whether those who need it name one version themselves, as torch does with CUDA's libraries.
    """
    found: dict[str, tuple[Version | None, bool]] = {}
    seen, waiting = set[tuple[str, str]](), [(requirement, "") for requirement in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in WITH_PYTHON or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        exact = [specifier.operator for specifier in requirement.specifier] == ["=="]
        distribution = _distribution(name)
        version = Version(distribution.version) if distribution else None
        found[name] = (version, exact and found.get(name, (None, True))[1])
        for part in ("", *requirement.extras):
            if distribution and (name, part) not in seen:
                seen.add((name, part))
                waiting += [(Requirement(text), part) for text in distribution.requires or ()]
    return found


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(write=sys.argv[1:] == ["--write"])
