"""Judges which settings a resume may change: a table over all fields of the config, and a verdict on each change.

A change is exact if the run goes on as if it had had the new value from its first step on: same weights, same losses.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tasks.runs.folder import flattened, latest_config, read_plan, steps_done
from training.config.run import RunConfig
from training.config.train import learning_rate
from training.planner.mixture import plan_sources
from training.planner.plan import length, steps_that_fit
from training.records.plan import MixturePhase, RunPlan
from training.records.record import Record
from training.shards.packing import one_epoch

Effect = Literal["exact", "rounding", "schedule", "breaks", "refused"]

NEW_RUN = "a new run with model.init=pretrained model.path=RUN/export can"
SAME_TOKENS = "the tokens must be the same, which is checked"
OTHER_TEXT = "from here on other sequences: some text comes twice, or never"
OTHER_UPDATES = "an optimizer that had this from its first step on would be elsewhere"

# exact: see above. rounding: but for the order in which numbers are summed, and for which units are dropped.
# schedule: exact if the steps that are done would have had the same learning rates and sources, else it breaks.
# breaks: no run that never stopped would have gone on so; needs --force. refused: not even then.
# The first row that a field matches counts.
TABLE: tuple[tuple[str, Effect, str], ...] = (
    ("name", "refused", "the run is known by it"),
    # its text
    ("data.path", "exact", SAME_TOKENS),
    ("data.hub_revision", "exact", SAME_TOKENS),
    ("data.sources.*.path", "exact", SAME_TOKENS),
    ("data.sources.*.hub_revision", "exact", SAME_TOKENS),
    ("data.sources.*.weight", "schedule", ""),
    ("data.sources.*.epochs", "schedule", ""),
    ("data.phases*", "schedule", ""),
    ("data.tokenizer.path", "exact", SAME_TOKENS),
    ("data.streaming", "exact", ""),
    ("data.processes", "exact", ""),
    ("data.engine.*", "exact", ""),
    ("data.*", "refused", f"the tokens would be others; {NEW_RUN} learn from them"),
    # its model
    ("model.dropout", "breaks", "other units are dropped from here on"),
    ("model.rope_theta", "breaks", "layers meet other positions than they were trained with"),
    ("model.path", "breaks", "weights are the checkpoint's, all else comes from there; its shape must be the same"),
    ("model.*", "refused", "the checkpoint's weights would not fit"),
    # how long it takes, and how fast it learns
    ("train.steps", "schedule", ""),
    ("train.max_tokens", "schedule", ""),
    ("train.max_epochs", "schedule", ""),
    ("train.target_minutes", "schedule", ""),
    ("train.learning_rate", "schedule", ""),
    ("train.min_learning_rate", "schedule", ""),
    ("train.schedule", "schedule", ""),
    ("train.warmup_steps", "schedule", ""),
    ("train.decay_steps", "schedule", ""),
    ("train.cooldown_steps", "schedule", ""),
    ("train.max_hours", "exact", ""),
    ("train.on_nonfinite", "exact", "steps that were left out stay left out"),
    ("train.log_every_steps", "exact", ""),
    # what a step is
    ("train.context", "breaks", OTHER_TEXT),
    ("train.global_batch", "breaks", OTHER_TEXT),
    ("train.packing", "breaks", OTHER_TEXT),
    ("train.seed", "breaks", "another order of data, other dropout and masks from here on"),
    ("train.mask_fraction", "breaks", "other masks from here on"),
    ("train.beta1", "breaks", OTHER_UPDATES),
    ("train.beta2", "breaks", OTHER_UPDATES),
    ("train.weight_decay", "breaks", OTHER_UPDATES),
    ("train.clip_norm", "breaks", OTHER_UPDATES),
    ("train.optimizer_path", "breaks", OTHER_UPDATES),
    ("train.freeze", "breaks", "fewer parameters are trained from here on"),
    ("parallel.precision", "breaks", "other arithmetic from here on"),
    # who does it, and how
    ("train.micro_batch", "rounding", ""),
    ("train.micro_batch_trial", "rounding", ""),
    ("train.activation_checkpointing", "rounding", ""),
    ("train.compile", "rounding", ""),
    ("train.deterministic", "rounding", ""),
    ("parallel.timeout_s", "exact", ""),
    ("parallel.*", "rounding", ""),
    # what is seen and kept of it
    ("checkpoint.*", "exact", ""),
    ("evaluation.quick_sequences", "exact", "but its validations and the earlier ones are of unlike text"),
    ("evaluation.*", "exact", ""),
    ("profile.*", "exact", ""),
    ("export.*", "exact", ""),
    ("registry.*", "exact", ""),
    ("gates.*", "exact", ""),
    ("rollout.*", "exact", ""),
    ("launch.*", "exact", ""),
    ("alerts.*", "exact", ""),
    ("store.*", "exact", ""),
    ("prices.*", "exact", ""),
    ("trainer.*", "refused", "another program is another run"),
)
NOTHING_DONE: tuple[Effect, str] = ("exact", "")
WORDS: dict[Effect, str] = {
    "exact": "exact",
    "rounding": "exact up to rounding and to which units are dropped",
    "breaks": "breaks exactness",
    "refused": "cannot be changed",
}


class Change(Record):
    field: str
    old: Any
    new: Any
    effect: Effect
    note: str

    def __str__(self) -> str:
        effect = WORDS[self.effect] + (f": {self.note}" if self.note else "")
        return f"{self.field} {_shown(self.old)} -> {_shown(self.new)} ({effect})"


class Resumption(Record):
    """A resume with other settings: what changed before the step after `after_step`."""

    after_step: int
    at: str
    changes: tuple[Change, ...]


class Resumptions(Record):
    """runs/ID/resume-overrides.json, oldest first."""

    resumptions: tuple[Resumption, ...] = ()

    @property
    def exact(self) -> bool:
        return not any(change.effect == "breaks" for each in self.resumptions for change in each.changes)


def changes(run_dir: Path, config: RunConfig, *, begun_with: RunConfig) -> tuple[Change, ...]:
    """The changes that `config` makes to the run; writes nothing. Raises ValueError for those that no run can take."""
    plan = read_plan(run_dir)
    old = latest_config(run_dir, begun_with=begun_with).model_dump(mode="json")
    new = dict(flattened(config.model_dump(mode="json")))
    fields = dict(flattened(old)) | {field: None for field in new if field not in dict(flattened(old))}
    changed = [(field, value, new.get(field)) for field, value in fields.items() if value != new.get(field)]
    if not changed:
        return ()
    effects = [_effect(field) for field, _, _ in changed]
    if plan is None or any(effect == "refused" for effect, _ in effects):
        verdict = NOTHING_DONE
    else:
        verdict = _on_schedule(plan, config, done=steps_done(run_dir))
    effects = [verdict if effect == "schedule" else (effect, note) for effect, note in effects]
    found = tuple(
        _with_freeze(Change(field=field, old=before, new=after, effect=effect, note=note))
        for (field, before, after), (effect, note) in zip(changed, effects, strict=True)
    )
    if refused := [change for change in found if change.effect == "refused"]:
        raise ValueError("\n".join([f"a run cannot be resumed so; start a new one: {change}" for change in refused]))
    return found


def accepted(run_dir: Path, config: RunConfig, *, begun_with: RunConfig, force: bool) -> tuple[Change, ...]:
    """Like `changes`, but without `force` raises ValueError also for changes that break exactness."""
    found = changes(run_dir, config, begun_with=begun_with)
    breaking = [str(change) for change in found if change.effect == "breaks"]
    if breaking and not force:
        refusal = (
            "not resumed: by these changes the results differ from a run that never stopped; undo them, or add --force:"
        )
        raise ValueError("\n".join([refusal, *breaking]))
    return found


def _effect(field: str) -> tuple[Effect, str]:
    return next((effect, note) for pattern, effect, note in TABLE if fnmatchcase(field, pattern))


def _on_schedule(plan: RunPlan, config: RunConfig, *, done: int) -> tuple[Effect, str]:
    """Whether the `done` steps would have been the same with the new length and learning rates."""
    train, epoch = config.train, None
    if train.max_epochs or train.max_tokens or config.data.sources:
        epoch = one_epoch(Path(plan.shards_dir), packing=train.packing, context=train.context)
    steps, sequences, _ = length(config, epoch, steps_in_time=steps_in_time(plan, config))
    if steps < done:
        raise ValueError(
            f"the run is at step {done} already, by the new settings it would end at step {steps}: "
            "raise train.steps, train.max_tokens, train.max_epochs or train.target_minutes"
        )
    full = done * plan.config.train.global_batch
    if plan.sequences < full <= sequences:
        return "breaks", f"step {done} was the last, and took only the rest of the data, not a whole batch"
    if plan.mixture and epoch is not None:
        _, mixture = plan_sources(
            config.data, epoch, steps=steps, sequences=sequences, global_batch=plan.config.train.global_batch
        )
        if _until(mixture, done) != _until(plan.mixture, done):
            return "breaks", f"the {done} steps that are done would have had other shares of the sources"
    had = [learning_rate(step, plan.config.train, steps=plan.steps) for step in range(done)]
    would = [learning_rate(step, config.train, steps=steps) for step in range(done)]
    if had == would:
        return "exact", ""
    step = max(range(done), key=lambda step: abs(had[step] - would[step]))
    rates = f"step {step + 1} had learning rate {had[step]:.3g}, would have had {would[step]:.3g}"
    return "breaks", rates + _cure(plan, config)


def steps_in_time(plan: RunPlan, config: RunConfig) -> int:
    """The limit by train.target_minutes of a resumed run: the plan's own, unless `config` has other minutes."""
    if config.train.target_minutes == plan.config.train.target_minutes:
        return plan.steps_in_time
    return steps_that_fit(config.train, step_s=plan.predicted.step_ms / 1000)


def _until(mixture: Sequence[MixturePhase], steps: int) -> list[MixturePhase]:
    return [phase for phase in mixture if phase.first_step < steps]


def _cure(plan: RunPlan, config: RunConfig) -> str:
    """The setting that trains longer and keeps the decay as it is; empty if there is none."""
    kept = plan.config.train
    wanted = {"steps", "max_tokens", "max_epochs", "target_minutes"}
    same = kept.model_dump(exclude=wanted) == config.train.model_dump(exclude=wanted)
    return f"; train.decay_steps={plan.steps} keeps the decay as it was" if same and not kept.decay_steps else ""


def _with_freeze(change: Change) -> Change:
    """Refuse to unfreeze parameters: they have no AdamW moments to go on with."""
    if change.field != "train.freeze" or set(change.old) <= set(change.new):
        return change
    note = f"the checkpoint has no optimizer state of what was frozen; {NEW_RUN} train it"
    return change.model_copy(update={"effect": "refused", "note": note})


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, list)) else str(value)


# What the run folder holds


def read_resumptions(run_dir: Path) -> Resumptions:
    path = run_dir / "resume-overrides.json"
    return Resumptions.read(path) if path.exists() else Resumptions()


def remember(run_dir: Path, found: tuple[Change, ...]) -> None:
    """Append to runs/ID/resume-overrides.json."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    latest = Resumption(after_step=steps_done(run_dir), at=now, changes=found)
    Resumptions(resumptions=(*read_resumptions(run_dir).resumptions, latest)).write(run_dir / "resume-overrides.json")
