"""Decides which settings a resume may change: a table over all fields of the config, and a verdict for each change.

A change is exact if the run continues as if it had had the new value from its first step: same weights, same losses.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tasks.runs.folder import flattened, latest_config, read_plan, steps_done
from tasks.workspace.paths import present
from training.config.run import RunConfig
from training.config.train import learning_rate
from training.planner.mixture import plan_sources
from training.planner.run_length import batches_of, length, steps_that_fit
from training.records.plan import MixturePhase, RunPlan
from training.records.record import Record
from training.shards.packing import one_epoch

Effect = Literal["exact", "rounding", "schedule", "breaks", "refused"]

NEW_RUN = "a new run with model.init=pretrained model.path=RUN/export can"
SAME_TOKENS = "the tokens must be the same, which is checked"
OTHER_TEXT = "later steps get other sequences: some text is seen twice, or never"
OTHER_UPDATES = "an optimizer with this setting from the first step would have other weights"

# exact: see above. rounding: exact except for the order of sums and for the units that dropout drops.
# schedule: exact if the finished steps would have had the same learning rates and sources; otherwise it breaks.
# breaks: results differ from a run that never stopped; needs --force. refused: not even with --force.
# The first row that matches a field counts.
TABLE: tuple[tuple[str, Effect, str], ...] = (
    ("name", "refused", "the run is identified by it"),
    # the text
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
    # the model
    ("model.dropout", "breaks", "dropout drops other units in later steps"),
    ("model.rope_theta", "breaks", "layers see positions on which they were not trained"),
    ("model.path", "breaks", "weights are the checkpoint's, other files come from there; its shape must be equal"),
    ("model.*", "refused", "the checkpoint's weights would not fit"),
    # the length of training, and its learning rates
    ("train.steps", "schedule", ""),
    ("train.max_tokens", "schedule", ""),
    ("train.max_epochs", "schedule", ""),
    ("train.target_minutes", "schedule", ""),
    ("train.batch_schedule*", "schedule", ""),
    ("train.learning_rate", "schedule", ""),
    ("train.min_learning_rate", "schedule", ""),
    ("train.schedule", "schedule", ""),
    ("train.warmup_steps", "schedule", ""),
    ("train.decay_steps", "schedule", ""),
    ("train.cooldown_steps", "schedule", ""),
    ("train.max_hours", "exact", ""),
    ("train.on_nonfinite", "exact", "skipped steps stay skipped"),
    ("train.on_spike", "exact", "what was skipped or left out stays so"),
    ("train.spike_window_steps", "exact", "no step is judged until the longer window is full"),
    ("train.spike_*", "exact", "what was skipped or left out stays so"),
    ("train.average*", "exact", "of the checkpoints that are there"),
    ("train.log_every_steps", "exact", ""),
    # the definition of a step
    ("train.context", "breaks", OTHER_TEXT),
    ("train.global_batch", "breaks", OTHER_TEXT),
    ("train.packing", "breaks", OTHER_TEXT),
    ("train.seed", "breaks", "later steps have another order of data, other dropout and other masks"),
    ("train.mask_fraction", "breaks", "later steps have other masks"),
    ("train.optimizer", "breaks", "the other optimizer begins without moments, at its first step"),
    ("train.beta2", "breaks", OTHER_UPDATES),
    ("train.weight_decay", "breaks", OTHER_UPDATES),
    ("train.clip_norm", "breaks", OTHER_UPDATES),
    ("train.z_loss", "breaks", "later steps minimize another loss"),
    ("train.optimizer_path", "breaks", OTHER_UPDATES),
    ("train.freeze", "breaks", "later steps train fewer parameters"),
    ("train.residual", "breaks", "later steps use other arithmetic"),
    ("parallel.fp8_by", "breaks", "later steps use other arithmetic"),
    ("parallel.precision", "breaks", "later steps use other arithmetic"),
    # the machines, and the way of training
    ("train.micro_batch", "rounding", ""),
    ("train.micro_batch_trial", "rounding", ""),
    ("train.activation_checkpointing", "rounding", ""),
    ("train.compile", "rounding", ""),
    ("train.deterministic", "rounding", ""),
    ("parallel.timeout_s", "exact", ""),
    ("parallel.*", "rounding", ""),
    # output and files
    ("checkpoint.*", "exact", ""),
    ("evaluation.quick_sequences", "exact", "but its validations are of other text than the earlier ones"),
    ("evaluation.*", "exact", ""),
    ("profile.*", "exact", ""),
    ("export.*", "exact", ""),
    ("registry.*", "exact", ""),
    ("gates.*", "exact", ""),
    ("rollout.*", "exact", ""),
    ("launch.*", "exact", ""),
    ("preset", "exact", ""),
    ("store.*", "exact", ""),
    ("prices.*", "exact", ""),
    ("trainer.*", "refused", "another program is another run"),
)
NOTHING_DONE: tuple[Effect, str] = ("exact", "")
WORDS: dict[Effect, str] = {
    "exact": "exact",
    "rounding": "exact up to rounding and to the units that dropout drops",
    "breaks": "breaks exactness",
    "refused": "cannot be changed",
}


class Change(Record):
    """One setting of a run that a resume changes."""

    field: str
    """Name of the config field, as SECTION.FIELD."""
    old: Any
    """Value that the run had so far, as JSON has it."""
    new: Any
    """Value from now on, as JSON has it."""
    effect: Effect
    """What the change does to the results, compared with a run that never stopped."""
    note: str
    """What the effect consists of; empty if there is nothing to add."""

    def __str__(self) -> str:
        effect = WORDS[self.effect] + (f": {self.note}" if self.note else "")
        return f"{self.field} {_shown(self.old)} -> {_shown(self.new)} ({effect})"


class Resumption(Record):
    """A resume with other settings."""

    after_step: int
    """Step of the newest checkpoint, after which the changes apply."""
    at: str
    """Time of the resume, in ISO 8601 and UTC."""
    changes: tuple[Change, ...]
    """Settings that differ from those before."""


class Resumptions(Record):
    """runs/ID/resume-overrides.json: the settings that resumes have changed."""

    resumptions: tuple[Resumption, ...] = ()
    """All resumes with other settings, oldest first."""

    @property
    def exact(self) -> bool:
        return not any(change.effect == "breaks" for each in self.resumptions for change in each.changes)


def changes(run_dir: Path, config: RunConfig, *, begun_with: RunConfig) -> tuple[Change, ...]:
    """Return the changes that `config` makes to the run; write nothing.

    Raises ValueError for changes that are refused.
    """
    plan = read_plan(run_dir)
    old = latest_config(run_dir, begun_with=begun_with).model_dump(mode="json")
    new = dict(flattened(config.model_dump(mode="json")))
    fields = dict(flattened(old)) | {field: None for field in new if field not in dict(flattened(old))}
    changed = [(field, value, new.get(field)) for field, value in fields.items() if value != new.get(field)]
    if not changed:
        return ()
    effects = [
        next((effect, note) for pattern, effect, note in TABLE if fnmatchcase(field, pattern))
        for field, _, _ in changed
    ]
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
        raise ValueError(
            "\n".join([f"a run cannot be resumed like this; start a new one: {change}" for change in refused])
        )
    return found


def accepted(run_dir: Path, config: RunConfig, *, begun_with: RunConfig, force: bool) -> tuple[Change, ...]:
    """Like `changes`, but without `force` raises ValueError also for changes that break exactness."""
    found = changes(run_dir, config, begun_with=begun_with)
    breaking = [str(change) for change in found if change.effect == "breaks"]
    if breaking and not force:
        refusal = (
            "not resumed: with these changes results differ from a run that never stopped; undo them, or add --force:"
        )
        raise ValueError("\n".join([refusal, *breaking]))
    return found


def _on_schedule(plan: RunPlan, config: RunConfig, *, done: int) -> tuple[Effect, str]:
    """Whether the `done` steps would have been the same with the new length and learning rates."""
    train, epoch = config.train, None
    if train.max_epochs or train.max_tokens or train.batch_schedule or config.data.sources:
        epoch = one_epoch(present(Path(plan.shards_dir)), packing=train.packing, context=train.context)
    steps, sequences, _ = length(config, epoch, steps_in_time=steps_in_time(plan, config))
    if steps < done:
        raise ValueError(
            f"the run is at step {done} already, by the new settings it would end at step {steps}: "
            "raise train.steps, train.max_tokens, train.max_epochs or train.target_minutes"
        )
    full = plan.batches.sequences_before(done)
    if plan.sequences < full <= sequences:
        return "breaks", f"step {done} was the last one, and used only the rest of the data, not a whole batch"
    batches = batches_of(config, epoch)
    if any(batches.sequences_before(step) != plan.batches.sequences_before(step) for step in range(done + 1)):
        return "breaks", f"the {done} finished steps would have had other batches"
    if plan.mixture and epoch is not None:
        _, mixture = plan_sources(config.data, epoch, batches, steps=steps, sequences=sequences)
        if _until(mixture, done) != _until(plan.mixture, done):
            return "breaks", f"the {done} finished steps would have had other shares of the sources"
    had = [learning_rate(step, plan.config.train, steps=plan.steps) for step in range(done)]
    would = [learning_rate(step, config.train, steps=steps) for step in range(done)]
    if had == would:
        return "exact", ""
    step = max(range(done), key=lambda step: abs(had[step] - would[step]))
    rates = f"step {step + 1} had learning rate {had[step]:.3g}, would have had {would[step]:.3g}"
    return "breaks", rates + _cure(plan, config)


def steps_in_time(plan: RunPlan, config: RunConfig) -> int:
    """Return a resumed run's limit of steps by train.target_minutes: the plan's, unless `config` has other minutes."""
    if config.train.target_minutes == plan.config.train.target_minutes:
        return plan.steps_in_time
    return steps_that_fit(config.train, lambda steps: steps * plan.predicted.step_ms / 1000)


def _until(mixture: Sequence[MixturePhase], steps: int) -> list[MixturePhase]:
    return [phase for phase in mixture if phase.first_step < steps]


def _cure(plan: RunPlan, config: RunConfig) -> str:
    """Return the setting that trains longer and keeps the decay; empty if there is none."""
    kept = plan.config.train
    wanted = {"steps", "max_tokens", "max_epochs", "target_minutes"}
    same = kept.model_dump(exclude=wanted) == config.train.model_dump(exclude=wanted)
    return f"; train.decay_steps={plan.steps} keeps the decay as it was" if same and not kept.decay_steps else ""


def _with_freeze(change: Change) -> Change:
    """Refuse to unfreeze parameters, because the checkpoint has no AdamW moments for them."""
    if change.field != "train.freeze" or set(change.old) <= set(change.new):
        return change
    note = f"the checkpoint has no optimizer state for frozen parameters; {NEW_RUN} train them"
    return change.model_copy(update={"effect": "refused", "note": note})


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, (str, list)) else str(value)


# Records in the run folder


def read_resumptions(run_dir: Path) -> Resumptions:
    path = run_dir / "resume-overrides.json"
    return Resumptions.read(path) if path.exists() else Resumptions()


def remember(run_dir: Path, found: tuple[Change, ...]) -> None:
    """Append to runs/ID/resume-overrides.json."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    latest = Resumption(after_step=steps_done(run_dir), at=now, changes=found)
    Resumptions(resumptions=(*read_resumptions(run_dir).resumptions, latest)).write(run_dir / "resume-overrides.json")
