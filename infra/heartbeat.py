"""The heartbeat of a node in a container: a file with the host's uptime, which the node writes each second.

Its age is the difference to the uptime now: a clock that is set changes neither.
"""

from __future__ import annotations

from dataclasses import dataclass

UPTIME = "/proc/uptime"


@dataclass(frozen=True)
class Heartbeat:
    """A container works while this file is younger than `max_age_s`; the image needs sh, cut and cat.

    `start_s`: the file may be missing for this long after the start. `every_s`: between two checks, each of which
    starts a process in the container, for about 0.1 s of a core.
    """

    path: str
    max_age_s: int = 60
    every_s: int = 15
    start_s: int = 60

    @property
    def check(self) -> str:
        """Return the shell command that succeeds while the heartbeat is young."""
        return f"[ \"$(($(cut -d. -f1 {UPTIME}) - $(cat '{self.path}')))\" -lt {self.max_age_s} ]"
