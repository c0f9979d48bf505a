"""The failures of docs/multi-node.md, "When something fails", on this machine, Docker hosts, Slurm and Kubernetes.

Each time the causes of the attempts are the true ones, the losses are to the bit those of plain ranks that nothing
happened to, MLflow has the true status (`train` and `reported` see to that), and nothing is left behind. Failures that
only one launcher can have are in tests/rig (test_recovery, test_partitions, test_storage), tests/slurm and
tests/tasks/launch/test_kubernetes.py.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import pytest

from tasks.launch.programs import run_custom_program
from tasks.launch.recovery import attempts_of
from tasks.planning.custom_program import plan_custom_program
from tasks.runs.errors import RunFailed, RunStopped
from tasks.tracking.final_status import reconcile_mlflow
from tests.support.backends import (
    EVERY,
    STEPS,
    STRIKE,
    Backend,
    Docker,
    Kubernetes,
    Local,
    Slurm,
    memory_folder,
    ranks_of,
    resume_once_told,
)
from tests.support.configs import read_plan
from tests.support.launched_runs import (
    at_step,
    causes,
    curve,
    has_checkpoint,
    launcher,
    mlflow_status,
    reaches,
    reported,
    seconds_to_next_step,
    train,
)
from tests.support.waiting import until
from training.config.run import RunConfig
from training.records.checkpoint import finished_checkpoints
from training.records.memory_checkpoint import newest_step
from training.records.plan import RunPlan
from training.tracking.rows import read_rows

pytestmark = pytest.mark.slow

Undisturbed = Callable[[Path], dict[int, float]]
Mistake = Callable[[RunPlan], RunPlan]
MARKS = {"local": [], "docker": [pytest.mark.rig], "slurm": [pytest.mark.slurm], "kubernetes": []}
MOST_S = 30.0  # from a failure to the next step: on two quiet cores it is 6 s, imports on busy ones take the rest
FAULT = "CUDA error: uncorrectable ECC error encountered"


def launched_on(*names: str, long: Collection[str] = ()) -> pytest.MarkDecorator:
    """Runs a test on these backends; on those in `long` only in `make test-all`, since CI has an hour."""
    marks = {name: [*MARKS[name], *([pytest.mark.long] if name in long else [])] for name in names}
    return pytest.mark.parametrize("backend", [pytest.param(n, marks=marks[n]) for n in names], indirect=True)


only_local_in_ci = launched_on("local", "docker", "slurm", long=("docker", "slurm"))
only_docker_in_ci = launched_on("local", "docker", "slurm", long=("local", "slurm"))
not_slurm_in_ci = launched_on("local", "docker", "slurm", long=("slurm",))
with_kubernetes = launched_on(*("local", "docker", "slurm", "kubernetes"), long=("docker", "slurm", "kubernetes"))
never_in_ci = launched_on("local", "docker", "slurm", long=("local", "docker", "slurm"))  # other tests show more


# Something dies


@never_in_ci
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("rank")
    expected = undisturbed(run_dir)
    train(
        run_dir,
        on_row=at_step(STRIKE, lambda: backend.kill_rank(run_dir), when=lambda: bool(finished_checkpoints(run_dir))),
    )
    first, second = attempts_of(run_dir)
    assert (first["ending"]["cause"], first["ending"]["detail"]) == ("killed", "rank 1 was killed (SIGKILL)")
    assert second["ending"]["cause"] == "done"
    assert second["from_step"] > 0
    assert second["from_step"] % EVERY == 0
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@launched_on("local", "docker", "slurm", "kubernetes", long=("slurm",))
def test_a_killed_node_costs_seconds(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("node")
    expected, killed_at = undisturbed(run_dir), list[float]()

    def strike() -> None:
        killed_at.append(time.time())
        backend.kill_node(run_dir)

    train(run_dir, on_row=at_step(STRIKE, strike, when=lambda: bool(finished_checkpoints(run_dir))))
    first, *_, last = attempts_of(run_dir)
    assert first["ending"]["cause"] in backend.dead_node_shows_as
    assert last["ending"]["cause"] == "done"
    assert last["from_step"] > 0
    assert seconds_to_next_step(run_dir, since=killed_at[0]) < MOST_S + backend.notices_dead_node_s
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@not_slurm_in_ci
def test_standbys_take_over(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("standby", launch__standby_after_s=0.0)
    expected, hosts = undisturbed(run_dir), read_plan(run_dir).hosts
    folder = run_dir / "attempts" / "standby"

    def strike() -> None:
        ranks = ranks_of(run_dir)
        for rank in ranks:  # or they would be done before the standbys have imported their program
            rank.suspend()
        until(lambda: all((folder / f"{host}.ready").exists() for host in hosts), "the standbys")
        ranks[-1].kill()
        for rank in ranks[:-1]:
            rank.resume()

    def are_started() -> bool:
        return all((folder / f"{host}.json").exists() for host in hosts)

    train(run_dir, on_row=at_step(STRIKE, strike, when=are_started))
    first, second = attempts_of(run_dir)
    assert (first["ending"]["detail"], first["stood_by"]) == ("rank 1 was killed (SIGKILL)", [])
    assert (second["ending"]["cause"], sorted(second["stood_by"])) == ("done", sorted(hosts))
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@only_docker_in_ci
def test_with_copies_in_memory_a_killed_node_costs_the_steps_since_the_newest(
    backend: Backend, undisturbed: Undisturbed
) -> None:
    """Of several hosts the one that dies takes what its memory held with it."""
    saving = {"checkpoint__every_steps": STEPS, "checkpoint__memory_every_steps": EVERY}
    with memory_folder() as memory_dir:
        run_dir = backend.make("memory", **saving, checkpoint__memory_dir=str(memory_dir))
        expected, saved = undisturbed(run_dir), list[int]()

        def strike() -> None:
            host = backend.kill_node(run_dir)
            saved.append(newest_step(run_dir))
            if backend.hosts > 1:
                shutil.rmtree(memory_dir / run_dir.name / host)

        train(run_dir, on_row=at_step(STRIKE, strike))
        assert causes(run_dir)[0] in backend.dead_node_shows_as
        assert attempts_of(run_dir)[-1]["from_step"] == saved[0] >= EVERY
        assert curve(run_dir) == expected
        used = [row for row in read_rows(run_dir / "metrics.jsonl") if "resumed_from_memory" in row]
        assert [(row["step"], row["resumed_from_memory"]) for row in used] == [(saved[0], 1.0)]
        assert not [path for path in memory_dir.rglob("*") if path.is_file()], "nothing stays in memory"
    backend.assert_nothing_is_left(run_dir)


@launched_on("docker", "slurm", "kubernetes", long=("docker", "kubernetes"))
def test_with_min_hosts_the_hosts_that_are_left_go_on(
    backend: Docker | Kubernetes | Slurm, undisturbed: Undisturbed
) -> None:
    """Without dropout: ranks draw other units when there are fewer of them."""
    patience = {"launch__lost_after_s": 5.0, "launch__daemon_grace_s": 5.0}
    run_dir = backend.make("fewer", launch__min_hosts=1, model__dropout=0.0, **patience)
    expected = undisturbed(run_dir)
    train(run_dir, on_row=at_step(STRIKE, lambda: backend.lose_host(run_dir)))
    *_, last = attempts_of(run_dir)
    assert (last["ending"]["cause"], list(last["hosts"].values())) == ("done", [1])
    losses = curve(run_dir)
    before = {step: loss for step, loss in losses.items() if step <= last["from_step"]}
    assert before == {step: expected[step] for step in before}, "to the bit"
    assert losses == pytest.approx(expected, rel=1e-4), "the same batches, added up in another order"
    backend.assert_nothing_is_left(run_dir)


@launched_on("local", long=("local",))
def test_one_rank_alone_is_started_again_too(backend: Local, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("alone", parallel__ranks=1)
    expected = undisturbed(run_dir)
    train(run_dir, on_row=at_step(STRIKE, lambda: backend.kill_rank(run_dir)))
    assert causes(run_dir) == ["killed", "done"]
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@only_local_in_ci
def test_attempts_without_a_new_checkpoint_come_to_an_end(backend: Backend) -> None:
    run_dir = backend.make("limit", checkpoint__every_steps=STEPS, launch__attempts=1)
    with pytest.raises(RunFailed, match=r"killed \(.*rank 1 was killed.*1 attempt without a new checkpoint") as failed:
        train(run_dir, on_row=at_step(STRIKE, lambda: backend.kill_rank(run_dir)))
    assert failed.value.cause == "killed"
    assert causes(run_dir) == ["killed"]
    backend.assert_nothing_is_left(run_dir)


# Something hangs, or is told to stop


@only_local_in_ci
def test_a_rank_that_hangs_is_found_by_the_others_patience(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("hangs", parallel__timeout_s=10)
    expected = undisturbed(run_dir)
    train(run_dir, on_row=at_step(STRIKE, lambda: backend.hang(run_dir)))
    assert causes(run_dir) == ["timeout", "done"]
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@only_local_in_ci
def test_ranks_that_got_sigterm_save_and_leave(backend: Backend, undisturbed: Undisturbed) -> None:
    """On this machine that is the user's order; elsewhere nobody asked for it, and they are started again."""
    run_dir = backend.make("sigterm")
    expected, strike = undisturbed(run_dir), at_step(STRIKE, lambda: backend.terminate_ranks(run_dir))
    if backend.sigterm_is_the_users:
        with pytest.raises(RunStopped, match="training was stopped at step"):
            train(run_dir, on_row=strike)
        backend.assert_nothing_is_left(run_dir)
        train(run_dir)
        assert causes(run_dir) == ["done", "done"]
    else:
        train(run_dir, on_row=strike)
        assert causes(run_dir) == ["killed", "done"]
    assert attempts_of(run_dir)[1]["from_step"] >= STRIKE, "the checkpoint that they left"
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@with_kubernetes
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="SIGINT"), pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.long)],
)
def test_an_interruption_leaves_a_checkpoint_and_a_second_start_goes_on(
    backend: Backend, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    run_dir = backend.make("interrupted")
    expected = undisturbed(run_dir)
    process = launcher(run_dir)
    until(reaches(run_dir, STRIKE), f"step {STRIKE}", process=process)
    process.send_signal(number)
    output = process.communicate()[0]
    assert process.returncode == 130, output
    assert "shardline resume interrupted` continues" in output
    assert mlflow_status(run_dir) == "KILLED"
    stopped_at = max(curve(run_dir))
    assert STRIKE <= stopped_at < STEPS
    assert has_checkpoint(run_dir, stopped_at)
    backend.assert_nothing_is_left(run_dir)
    train(run_dir)
    assert causes(run_dir) == ["stopped", "done"]
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


# The launcher is killed


def kill_launcher(backend: Backend, run_dir: Path) -> psutil.Process:
    """Kill -9, while one of its ranks hangs, so that none is done before it notices; returns that rank."""
    process = launcher(run_dir)
    until(reaches(run_dir, STRIKE), f"step {STRIKE}", process=process)
    rank = backend.hang(run_dir)
    process.kill()
    process.wait()
    return rank


@launched_on("local", "docker", "slurm", "kubernetes", long=("slurm", "kubernetes"))
def test_ranks_end_with_their_launcher_and_the_next_start_goes_on(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("orphaned")
    expected = undisturbed(run_dir)
    resume_once_told(kill_launcher(backend, run_dir)).join()
    until(lambda: not ranks_of(run_dir), "the end of all ranks")
    stopped_at = max(curve(run_dir))
    assert STRIKE <= stopped_at < STEPS, "they ended in the middle"
    assert has_checkpoint(run_dir, stopped_at), "having saved what they had"
    reconcile_mlflow()
    assert mlflow_status(run_dir) == "KILLED"
    train(run_dir)
    assert causes(run_dir) == ["done"], "the killed one was never told of its attempt's end"
    assert attempts_of(run_dir)[0]["from_step"] == stopped_at
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@launched_on("docker", "slurm", "kubernetes", long=("docker", "slurm"))
def test_a_resume_takes_over_an_attempt_that_still_lives(backend: Backend, undisturbed: Undisturbed) -> None:
    run_dir = backend.make("taken")
    expected = undisturbed(run_dir)
    resume_once_told(kill_launcher(backend, run_dir))
    train(run_dir)
    (attempt,) = attempts_of(run_dir)
    assert attempt["from_step"] >= STRIKE, "the living attempt saved a checkpoint when it was taken over"
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


# What another attempt would not mend


def assert_ends_at_once(backend: Backend, undisturbed: Undisturbed, mistake: Mistake, *, cause: str) -> None:
    """The first attempt at a mistaken plan is the last one; with the good plan the run goes on."""
    run_dir = backend.make("mistaken", checkpoint__every_steps=STEPS)
    good, expected = read_plan(run_dir), undisturbed(run_dir)
    mistake(good).write(run_dir / "plan.json")
    with pytest.raises(RunFailed, match="another attempt would end the same way") as failed:
        train(run_dir)
    assert failed.value.cause == cause
    assert causes(run_dir) == [cause]
    backend.assert_nothing_is_left(run_dir)
    good.write(run_dir / "plan.json")
    train(run_dir)
    assert causes(run_dir) == [cause, "done"]
    assert curve(run_dir) == expected
    backend.assert_nothing_is_left(run_dir)


@only_docker_in_ci
def test_no_memory_is_no_reason_to_try_again(backend: Backend, undisturbed: Undisturbed) -> None:
    assert_ends_at_once(backend, undisturbed, backend.starved, cause="out of memory")


def diverging(plan: RunPlan) -> RunPlan:
    """Each step multiplies the weights by -99."""
    return with_fields(plan, learning_rate=10.0, weight_decay=10.0, warmup_steps=0, schedule="constant")


def misspelled(plan: RunPlan) -> RunPlan:
    """Which only ranks can see: they have the model's parameters."""
    return with_fields(plan, freeze=("*.no_such_parameter",))


def with_fields(plan: RunPlan, **fields: object) -> RunPlan:
    config = plan.config.model_dump()
    config["train"] |= fields
    return plan.model_copy(update={"config": RunConfig.model_validate(config)})


@only_local_in_ci
@pytest.mark.parametrize(
    ("mistake", "cause"),
    [pytest.param(diverging, "bad loss", marks=pytest.mark.long), pytest.param(misspelled, "bad config")],
)
def test_a_mistake_is_no_reason_to_try_again(
    backend: Backend, undisturbed: Undisturbed, mistake: Mistake, cause: str
) -> None:
    assert_ends_at_once(backend, undisturbed, mistake, cause=cause)


# A GPU that fails again and again: a script, since no GPU is here


def run_on_broken_gpu(backend: Backend, **launch: object) -> Path:
    """Run a program whose second rank's GPU fails; the run's folder."""
    run_dir, script = backend.home / "gpu", backend.home / "broken.py"
    run_dir.mkdir()
    script.write_text(f'import os\nif os.environ["RANK"] == "1":\n    raise RuntimeError("{FAULT}")\n')
    backend.machines.write(run_dir / "inventory.json")
    fields = {key.removeprefix("launch__"): value for key, value in backend.launch.items()}
    config = RunConfig.model_validate({"launch": fields | launch, "trainer": {"script": str(script)}})
    with reported(run_dir, config) as run:
        plan = plan_custom_program(
            config,
            backend.machines,
            run_id=run_dir.name,
            mlflow_run_id=run.mlflow_run_id,
            experiment=(run.experiment_id, "tests"),
        )
        run_custom_program(plan, run_dir=run_dir)
    return run_dir


@launched_on("docker", "slurm", long=("slurm",))
def test_after_two_faults_of_one_gpu_the_run_goes_on_without_its_host(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = run_on_broken_gpu(backend, min_hosts=1)
    assert causes(run_dir) == ["gpu fault", "gpu fault", "done"]
    first, last = (host.name for host in backend.machines.hosts)
    assert [attempt["hosts"] for attempt in attempts_of(run_dir)] == [{first: 1, last: 1}] * 2 + [{first: 1}]
    assert {(attempt["ending"]["host"], attempt["ending"]["gpu"]) for attempt in attempts_of(run_dir)[:2]} == {
        (last, 0)
    }
    assert f"GPU 0 failed 2 times: continuing without {last}" in caplog.text
    backend.assert_nothing_is_left(run_dir)


@not_slurm_in_ci
def test_without_a_host_to_spare_the_run_ends_and_names_the_gpu(backend: Backend) -> None:
    with pytest.raises(RunFailed) as failed:
        run_on_broken_gpu(backend)
    run_dir, host = backend.home / "gpu", backend.machines.hosts[-1]
    assert causes(run_dir) == ["gpu fault", "gpu fault"]
    assert failed.value.cause == "gpu fault"
    gpu = f"GPU {len(host.devices) - 1}"
    assert failed.value.detail.startswith(host.name)
    assert failed.value.detail.endswith(f", {gpu}: RuntimeError: {FAULT}")
    left, needed = backend.hosts - 1, backend.hosts
    assert f"without {host.name} {left} of the {needed} host{'s' * (needed > 1)} needed are left" in str(failed.value)
    assert "launch.min_hosts" in str(failed.value)
    backend.assert_nothing_is_left(run_dir)
