"""The shell commands of README and docs, and what a test does with each; run as a program, it counts them.

A comment before each fence of shell commands says which; readers of the page do not see it:

    <!-- run -->            run, one after another, in a folder for the page
    <!-- run: exit 2 -->    the same; the last command ends with that code
    <!-- run: slow -->      run by the slow test, a page as one script
    <!-- parsed: WHY -->    not run; commands, options, fields of the config, modules and targets of make exist
    <!-- not run: WHY -->   the same for our own commands in it; others are left unread
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import REPO

PAGES = tuple(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/*/*.md")
    for path in sorted(REPO.glob(pattern))
)
SHELL = ("sh", "bash", "console")  # console: lines after `$ ` are commands, the others what they print
BETWEEN_COMMANDS = {"&&", "||", ";", "|", "&", "(", ")", ";;"}
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Fence:
    page: Path
    line: int
    language: str
    text: str
    mark: str  # run, parsed or not run; empty without a comment
    why: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"

    @property
    def script(self) -> str:
        if self.language != "console":
            return self.text
        lines = [line for line in self.text.splitlines() if line.startswith("$ ")]
        return "\n".join(line[2:] for line in lines)

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command, without variables set before it; without those inside of quotes and `$()`."""
        return [words for line in self.lines for words in commands_of(line)]

    @property
    def lines(self) -> list[str]:
        """Lines of the script, those that end in a backslash joined with the next; without comments alone."""
        lines = self.script.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def commands_of(line: str) -> Iterator[list[str]]:
    words = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
    words.whitespace_split = True
    found: list[str] = []
    for word in [*words, ";"]:
        if word in BETWEEN_COMMANDS:
            if found:
                yield found
            found = []
        elif found or not ASSIGNMENT.match(word):
            found.append(word)


def fences(pages: tuple[Path, ...] = PAGES) -> list[Fence]:
    return [fence for page in pages for fence in _fences_of(page)]


def _fences_of(page: Path) -> Iterator[Fence]:
    mark, start, language, block = ("", ""), 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        edge = re.fullmatch(r" *```(\w*)", line)
        if edge and start:
            text = "\n".join(block)
            yield Fence(page, start, language, text, *mark)
            mark, start = ("", ""), 0
        elif edge:
            start, language, block = number, edge[1], []
        elif start:
            block.append(line)
        elif comment := re.fullmatch(r" *<!-- (run|parsed|not run)(?:: (.+))? -->", line):
            mark = (comment[1], comment[2] or "")
        elif line.strip():
            mark = ("", "")


def counts() -> str:
    """How many fences and commands are run, parsed or neither, and why."""
    shell = [fence for fence in fences() if fence.language in SHELL]
    lines = []
    for mark in ("run", "parsed", "not run"):
        those = [fence for fence in shell if fence.mark == mark]
        lines.append(f"{mark}: {sum(len(fence.commands) for fence in those)} commands in {len(those)} fences")
        if mark != "run":
            reasons = Counter(fence.why for fence in those)
            lines += [f"  {number} x {why}" for why, number in reasons.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(counts())
