"""Recovery under seeded faults: what must hold holds, and the checks see it when the code is wrong."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.hosts import HostError
from tasks.launch import attempt, docker_hosts, recovery
from tasks.launch.attempt import Attempt
from tasks.launch.docker_hosts import DockerLauncher
from tasks.launch.failure import AttemptOutcome, classify
from tasks.launch.host_set import _Candidates
from tasks.launch.launcher import Program
from tasks.launch.lease import Lease, withdraw_leases
from tasks.launch.standby import Standbys
from tasks.tracking import final_status, mlflow_run
from tests.support import fault_simulation
from tests.support.fault_simulation import FAULTS, Outcome, replay, simulate, simulate_many
from training.records.checkpoint import newest_intact
from training.tracking import mlflow_sender
from training.tracking.mlflow_sender import Sent

FEW, SOME, MANY = 150, 400, 10_000


def found_in(outcomes: Sequence[Outcome]) -> str:
    broken = [outcome for outcome in outcomes if outcome.violations]
    return "\n".join(f"{replay(outcome.seed)}: {'; '.join(outcome.violations)}" for outcome in broken)


@pytest.mark.slow
def test_faults_in_any_combination_end_in_a_run_that_is_as_it_should_be() -> None:
    outcomes = [simulate(seed) for seed in range(FEW)]
    assert found_in(outcomes) == ""
    assert {fault for outcome in outcomes for fault in outcome.faults} == FAULTS.keys()
    assert {ending for outcome in outcomes for ending in outcome.endings} >= {"done", "failed", "stopped", "killed"}
    assert max(outcome.attempts for outcome in outcomes) > 3
    assert sum(outcome.taken_over for outcome in outcomes) > 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [range(FEW, SOME), pytest.param(range(SOME, MANY), marks=pytest.mark.long)])
def test_faults_by_the_hundred(seeds: range) -> None:
    """Each of the mistakes below is seen among the first 150 seeds."""
    assert found_in([*simulate_many(seeds)]) == ""


def _not_fenced(self: _Candidates) -> None:
    self.absent = {}


def _killed_is_an_error(*arguments: Any, **options: Any) -> AttemptOutcome:
    outcome = classify(*arguments, **options)
    return outcome.model_copy(update={"cause": "error"}) if outcome.cause == "killed" else outcome


def _left_alone(self: Standbys) -> None:
    self.wait()


def _hand_over_unseen(self: DockerLauncher, host: Any, path: Path, program: Program) -> str:
    container, _ = self.standbys.pop(host.name, ("", None))
    with suppress(HostError):
        if container:
            client = docker_hosts.connect(host)
            docker_hosts.containers.give_input(client, container, json.dumps({"task": str(path)}).encode())
    return container


def _lease_is_not_kept(run_dir: Path, *, keep: Path | None) -> bool:
    return withdraw_leases(run_dir)


def _created_without_asking(client: Any, experiment_id: str, *, run_id: str, tags: dict[str, str]) -> str:
    return str(client.create_run(experiment_id, run_name=run_id, tags=tags).info.run_id)


def _without_asking(sent: Sent, *_: object) -> Sent:
    return sent.model_copy(update={"in_doubt": ()})


# what is wrong: where, with what, the faults under which that shows, and a word of what the checks say
MISTAKES: dict[str, tuple[object, str, Callable[..., object] | float, tuple[str, ...], str]] = {
    "hosts are not fenced": (_Candidates, "fence", _not_fenced, ("launcher killed",), "same time"),
    "a lease is not withdrawn": (Lease, "withdraw", lambda self: self._over.set(), ("silent daemon",), "lease"),
    "lost hosts are never noticed": (
        Attempt, "lost", lambda self: [], ("partition", "power", "node hangs"), "come to its end"
    ),
    "attempts are counted through a new checkpoint": (
        recovery, "newest_step", lambda run_dir: 0, ("rank killed", "container killed"), "were used up"
    ),
    "a killed rank counts as an error of its own": (
        attempt, "classify", _killed_is_an_error, ("rank killed",), "which nothing made"
    ),
    "the oldest checkpoint is loaded": (
        fault_simulation, "newest_intact", lambda folders, **_: newest_intact(folders[:1]), ("rank killed",), "newest"
    ),
    "standbys are left at the end": (Standbys, "close", _left_alone, (), "leases of attempts"),
    "a dead standby counts as ready": (
        DockerLauncher, "_hand_over", _hand_over_unseen, ("rank killed", "standby killed"), "has no task"
    ),
    "fencing withdraws the lease of what stands by": (
        docker_hosts, "withdraw_leases", _lease_is_not_kept, ("rank killed",), "while its launcher works"
    ),
    "the end is not reported": (mlflow_run, "close", lambda *_: None, ("bad loss",), "ending.json says"),
    "an end that nothing takes is given up at once": (
        final_status, "PATIENCE_S", 0.0, ("disk full", "MLflow away", "bad loss"), "MLflow says KILLED"
    ),
    "rows of ranks that outlive their launcher are forgotten": (
        final_status, "has_unsent_rows", lambda folder: False, ("launcher killed",), "rows are not in MLflow"
    ),
    "an MLflow run whose ID was lost is left open": (
        mlflow_run, "_created", _created_without_asking, ("MLflow loses answers",), "nobody knows"
    ),
    "rows without an answer are sent again": (
        mlflow_sender, "_with_answer", _without_asking, ("MLflow loses answers", "rank killed"), "twice"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_recovery_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, kinds, words = MISTAKES[mistake]
    monkeypatch.setattr(place, name, wrong)
    violations = itertools.chain.from_iterable(simulate(seed, kinds=kinds).violations for seed in range(FEW))
    assert any(words in violation for violation in violations)
