"""What is read from daemons' answers: clocks, images stored in different ways, and what a refusal leaves to ask for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from infra.containers import Bind, Job
from infra.preflight import Probe, clock_findings, image_findings, without

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def clock(seconds: float, *, asked_for_s: float = 0.0) -> tuple[str, ...]:
    """The finding about a clock that is ahead by so much, when the answer took `asked_for_s`."""
    there = (NOW + timedelta(seconds=seconds)).astimezone(timezone(timedelta(hours=2)))
    return clock_findings(there.isoformat(), before=NOW.timestamp(), after=NOW.timestamp() + asked_for_s)


def test_a_clock_that_is_off_is_told_by_how_much_and_to_which_side() -> None:
    assert clock(4.9) == clock(-4.9) == ()
    assert clock(7.26)[0].startswith("its clock is 7.3 s ahead of the launcher's, 5 s are allowed")
    assert clock(-3600)[0].startswith("its clock is 3600.0 s behind the launcher's")


def test_a_slow_answer_is_no_skew() -> None:
    assert clock(9.0, asked_for_s=10.0) == ()
    assert "6.0 s ahead" in clock(16.0, asked_for_s=10.0)[0]


def test_dockers_nanoseconds_are_read() -> None:
    stamp = "2026-11-20T12:00:00.123456789Z"
    assert clock_findings(stamp, before=NOW.timestamp(), after=NOW.timestamp() + 1) == ()


def test_the_same_digest_is_the_same_image_whatever_its_ids() -> None:
    here = Probe("a", reachable=True, image_id="sha256:1", digests=("r.example/x@sha256:d",))
    stored_otherwise = Probe("b", reachable=True, image_id="sha256:2", digests=("r.example/x@sha256:d",))
    another = Probe("c", reachable=True, image_id="sha256:3", digests=("r.example/x@sha256:e",))
    without_image = Probe("d", reachable=True)
    assert image_findings("x", [here, stored_otherwise, without_image]) == {}
    assert list(image_findings("x", [without_image, here, another])) == ["c"]


JOB = Job(image="x", command=("python",), name="x", mounts=(Bind("/a", "/a"), Bind("/a/b", "/b")), gpus=2)


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', {"gpus": 0}),
        ("nvidia-container-cli: device error: 7: unknown device: unknown", {"gpus": 0}),
        ("error setting rlimit type 8: operation not permitted: unknown", {"memlock": False}),
        (
            'invalid mount config for type "bind": bind source path does not exist: /a\n',
            {"mounts": (Bind("/a/b", "/b"),)},
        ),
    ],
)
def test_what_was_refused_is_left_out_and_nothing_else(words: str, left: dict[str, object]) -> None:
    lesser = without(words, JOB)
    assert lesser is not None
    assert {name: value for name, value in vars(lesser).items() if value != getattr(JOB, name)} == left
    assert without(words, lesser) is None  # refused again all the same: there is no other try


def test_an_unknown_refusal_leaves_nothing_to_ask_for() -> None:
    assert without("no space left on device", JOB) is None
