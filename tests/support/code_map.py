"""Draws docs/code-map.svg, the picture of rooms and packages, from the imports: `make map`.

Rows are those of PACKAGES in tests/test_imports.py, the lowest at the bottom; sizes and arrows are counted in the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.support.repository import REPO
from tests.test_imports import PACKAGES, TORCH_FREE, file_graph, modules, package_of

PICTURE = REPO / "docs" / "code-map.svg"
BOX_W, BOX_H, GAP = 142, 40, 8
MOST_IN_A_ROW = 4
ROOM_W = MOST_IN_A_ROW * (BOX_W + GAP) + GAP
HEADER, MARGIN, GUTTER, BETWEEN = 50, 16, 112, 44
COLOURS = {"flows": "#fde8c8", "tasks": "#d8ead3", "ranks": "#f4d3d3", "contract": "#d3e3f5", "infra": "#e4dcef"}
STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;text-anchor:middle;fill:#222}"
    ".room{font-size:17px;font-weight:bold}.about{font-size:12px}.name{font-size:13px;font-weight:bold}"
    ".size{font-size:11px;fill:#555}.count{font-size:11px}"
)

ARROW_TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0 0L10 5L0 10z" fill="#444"/></marker></defs>'
)


@dataclass(frozen=True)
class Room:
    """A frame of the picture; `rows` of package names, the lowest first."""

    key: str
    title: str
    about: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def height(self) -> int:
        return HEADER + len(self.rows) * (BOX_H + GAP) + GAP


@dataclass(frozen=True)
class Frame:
    room: Room
    left: int
    top: int

    @property
    def right(self) -> int:
        return self.left + ROOM_W

    @property
    def middle(self) -> int:
        return self.left + ROOM_W // 2

    @property
    def bottom(self) -> int:
        return self.top + self.room.height


def rooms() -> dict[str, Room]:
    def rows_of(room: str, wanted: Iterable[str]) -> tuple[tuple[str, ...], ...]:
        names = set(wanted)
        found = (tuple(f"{room}.{name}" for name in line.split() if name in names) for line in PACKAGES[room])
        return tuple(row for row in found if row)

    every = {room: [name for line in lines for name in line.split()] for room, lines in PACKAGES.items()}
    with_torch = set(every["training"]) - set(TORCH_FREE)
    return {
        room.key: room
        for room in (
            Room("flows", "flows", "the story, and how people reach it", rows_of("flows", every["flows"])),
            Room("tasks", "tasks", "one verb each: records in, records out", rows_of("tasks", every["tasks"])),
            Room("ranks", "training, with torch", "runs on ranks", rows_of("training", with_torch)),
            Room("contract", "training, without torch", "what every machine knows", rows_of("training", TORCH_FREE)),
            Room("infra", "infra", "Docker, hosts, images", (("infra",),)),
        )
    }


def room_of(package: str) -> str:
    room, _, name = package.partition(".")
    if room == "training":
        return "contract" if name in TORCH_FREE else "ranks"
    return room


def sizes() -> dict[str, str]:
    """Package -> `15 files, 1,944 lines`; of a package that is one file its lines."""
    files, lines = Counter[str](), Counter[str]()
    for name, path in modules(REPO).items():
        if name != package_of(name).split(".")[0] or name == "infra":
            files[package_of(name)] += 1
            lines[package_of(name)] += len(path.read_text().splitlines())
    return {
        package: f"{number} files, {lines[package]:,} lines" if number > 1 else f"{lines[package]:,} lines"
        for package, number in files.items()
    }


def imports_between_rooms() -> Counter[tuple[str, str]]:
    """How many times a file of one room imports a file of another."""
    pairs = Counter[tuple[str, str]]()
    for name, others in file_graph(REPO).items():
        for other in others:
            pairs[room_of(package_of(name)), room_of(package_of(other))] += 1
    return Counter({pair: number for pair, number in pairs.items() if pair[0] != pair[1]})


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def draw_room(frame: Frame, size: dict[str, str]) -> list[str]:
    room = frame.room
    drawn = [
        f'<rect x="{frame.left}" y="{frame.top}" width="{ROOM_W}" height="{room.height}" rx="8" '
        f'fill="{COLOURS[room.key]}" stroke="#888"/>',
        text(frame.middle, frame.top + 22, room.title, "room"),
        text(frame.middle, frame.top + 40, room.about, "about"),
    ]
    for number, row in enumerate(reversed(room.rows)):
        y = frame.top + HEADER + number * (BOX_H + GAP)
        left = frame.middle - (len(row) * (BOX_W + GAP) - GAP) / 2
        for place, package in enumerate(row):
            x = left + place * (BOX_W + GAP)
            name = package.rpartition(".")[2]
            if (REPO / f"{package.replace('.', '/')}.py").exists():
                name += ".py"
            drawn += [
                f'<rect x="{x:g}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="4" fill="#fff" stroke="#aaa"/>',
                text(x + BOX_W / 2, y + 17, name, "name"),
                text(x + BOX_W / 2, y + 32, size[package], "size"),
            ]
    return drawn


def draw_arrow(start: tuple[float, float], end: tuple[float, float], *, label: tuple[float, float], count: int) -> str:
    (x1, y1), (x2, y2) = start, end
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#444" stroke-width="2"'
    return f'{line} marker-end="url(#tip)"/>' + text(*label, f"{count} imports", "count")


def down(upper: Frame, lower: Frame) -> dict[str, tuple[float, float]]:
    x, y = upper.middle, (upper.bottom + lower.top) / 2
    return {"start": (x, upper.bottom), "end": (x, lower.top - 3), "label": (x + 50, y + 4)}


def right(here: Frame, there: Frame, *, start: float, end: float) -> dict[str, tuple[float, float]]:
    x = (here.right + there.left) / 2
    return {"start": (here.right, start), "end": (there.left - 3, end), "label": (x, start - 8)}


def draw() -> str:
    """The picture: flows over tasks on the left, both halves of training over infra on the right."""
    room, second = rooms(), MARGIN + ROOM_W + GUTTER
    flows, ranks = Frame(room["flows"], MARGIN, MARGIN), Frame(room["ranks"], second, MARGIN)
    below = max(flows.bottom, ranks.bottom) + BETWEEN
    tasks, contract = Frame(room["tasks"], MARGIN, below), Frame(room["contract"], second, below)
    infra = Frame(room["infra"], second, contract.bottom + BETWEEN)
    frames = (flows, tasks, ranks, contract, infra)
    contract_y, infra_y = (frame.top + frame.room.height / 2 for frame in (contract, infra))
    arrows = {
        ("flows", "tasks"): down(flows, tasks),
        ("ranks", "contract"): down(ranks, contract),
        ("tasks", "contract"): right(tasks, contract, start=contract_y, end=contract_y),
        ("tasks", "infra"): right(tasks, infra, start=infra_y, end=infra_y),
        ("flows", "contract"): right(flows, contract, start=flows.bottom - 50, end=contract.top + 30),
    }
    counts, size = imports_between_rooms(), sizes()
    assert set(counts) == set(arrows), f"rooms that import each other: {sorted(counts)}; arrows: {sorted(arrows)}"
    drawn = [line for frame in frames for line in draw_room(frame, size)]
    drawn += [draw_arrow(**place, count=counts[pair]) for pair, place in arrows.items()]
    width, height = ranks.right + MARGIN, max(tasks.bottom, infra.bottom) + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ARROW_TIP, ground, *drawn, "</svg>\n"])


def main() -> None:
    PICTURE.write_text(draw())
    print(PICTURE.relative_to(REPO))


if __name__ == "__main__":
    main()
