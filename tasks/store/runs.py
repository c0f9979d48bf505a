"""A run on the store: URL/runs/RUN has its records, and checkpoints/STEP as in the run's folder, each manifest last."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from tasks.store.transfer import delete, download_all, read_bytes, sizes, upload_all
from tasks.workspace.paths import run_folder
from training.config.run import RunConfig
from training.config.store import StoreConfig
from training.records.checkpoint import (
    CHECKPOINT_MANIFEST,
    KEEP,
    CheckpointManifest,
    checkpoint_folder,
    damage,
    finished_checkpoints,
    kept_steps,
)
from training.records.record import DamagedRecord
from training.store.urls import check_url, is_url

logger = logging.getLogger(__name__)

# Files that belong to the run's machine, or are made again where the run continues.
OF_THIS_MACHINE = frozenset(
    {"owner.json", "gang.json", "ending.json", "metrics.sent.json", "outcome.json", "parity.json"}
)
RESULTS = ("result.json", "eval.json")  # these files name a checkpoint, which is copied before them
RECORDS = (".json", ".jsonl")  # suffixes


def run_url(store: StoreConfig, run_id: str) -> str:
    return f"{store.url.rstrip('/')}/runs/{run_id}"


def run_of_url(url: str) -> str:
    """Return the run's ID in URL/runs/RUN. Raises ValueError if the URL names no run."""
    check_url(url, field="run")
    parts = url.rstrip("/").split("/")
    if len(parts) < 3 or parts[-2] != "runs":
        raise ValueError(f"{url} is not a run on a store: give store.url/runs/RUN")
    return parts[-1]


def is_on_store(run: str) -> bool:
    """Whether a run is named by its URL instead of its ID."""
    return is_url(run)


class RunOnStore:
    """The copy of one run's folder on the store."""

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url, self.run_dir = url, run_dir
        self._manifests: dict[int, CheckpointManifest] = {}  # checkpoints that were read or written so far

    def steps(self) -> dict[int, dict[str, int]]:
        """Return step -> files and their bytes, for each checkpoint that is complete on the store."""
        found: dict[int, dict[str, int]] = {}
        for name, size in sizes(f"{self.url}/checkpoints").items():
            step, _, file = name.partition("/")
            if step.isdigit():
                found.setdefault(int(step), {})[file] = size
        return {step: files for step, files in sorted(found.items()) if CHECKPOINT_MANIFEST in files}

    def send_checkpoint(self, folder: Path) -> int:
        """Copy a checkpoint, the run's records, then the manifest; return the bytes.

        The caller holds the checkpoint.
        """
        manifest = CheckpointManifest.read(folder / CHECKPOINT_MANIFEST)
        url = f"{self.url}/checkpoints/{folder.name}"
        names = [*manifest.files, *([KEEP] if (folder / KEEP).exists() else [])]
        title = f"copying the checkpoint of step {manifest.step} to the store"
        upload_all(((folder / name, f"{url}/{name}") for name in names), title=title)
        self.send_records()
        upload_all([(folder / CHECKPOINT_MANIFEST, f"{url}/{CHECKPOINT_MANIFEST}")])
        self._manifests[manifest.step] = manifest
        return sum(file.size_bytes for file in manifest.files.values())

    def send_records(self, *, results: bool = False) -> None:
        """Copy the run's small files; those that name a checkpoint only with `results`."""
        records = {path.name: path for path in self.run_dir.iterdir() if _is_record(path.name)}
        left_out = OF_THIS_MACHINE if results else OF_THIS_MACHINE | set(RESULTS)
        upload_all((path, f"{self.url}/{name}") for name, path in records.items() if name not in left_out)
        delete(f"{self.url}/{name}" for name in RESULTS if name not in records)  # from before a longer training

    def prune(self, config: RunConfig) -> None:
        """Delete the checkpoints that no rule keeps, and incomplete ones of killed uploads."""
        there, whole = self.steps(), list[CheckpointManifest]()
        for step in there:
            try:
                whole.append(self._manifest(step))
            except DamagedRecord as error:
                logger.warning("the checkpoint counts as incomplete: %s", error.problem)
        if not whole:
            return
        kept, oldest = kept_steps(whole, config), whole[-config.checkpoint.keep_last :][0].step
        held = {step for step, files in there.items() if KEEP in files}
        held |= {int(path.name) for path in finished_checkpoints(self.run_dir) if (path / KEEP).exists()}
        for step in there:
            if step < oldest and step not in kept | held:
                self._delete(step)

    def leave_out(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints that were trained on the batches of these steps, and copy the run's records."""
        for step in self.steps():
            if self._manifest(step).was_trained_on(steps):
                self._delete(step)
        self.send_records()

    def _delete(self, step: int) -> None:
        url = f"{self.url}/checkpoints/{step:08d}"
        others = [name for name in sizes(url) if name != CHECKPOINT_MANIFEST]
        delete([f"{url}/{CHECKPOINT_MANIFEST}", *(f"{url}/{name}" for name in others)])  # it is incomplete from now on

    def fetch(self) -> Path | None:
        """Fetch the newest complete checkpoint and its records, unless the run's folder has one that is as new.

        Returns the fetched folder. A checkpoint whose files differ from its manifest is skipped, with a warning. Raises
        RuntimeError if there are checkpoints and none is complete.
        """
        newest_here = max((int(path.name) for path in finished_checkpoints(self.run_dir)), default=0)
        newer = [step for step in self.steps() if step > newest_here]
        for step in reversed(newer):
            folder = checkpoint_folder(self.run_dir, step)
            partial = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(partial, ignore_errors=True)
            url = f"{self.url}/checkpoints/{folder.name}"
            logger.info("downloading the checkpoint of step %d from %s", step, url)
            try:
                files = self._manifest(step).files
                download_all(
                    url,
                    [*files, CHECKPOINT_MANIFEST],
                    partial,
                    title=f"downloading the checkpoint of step {step}",
                    num_bytes=sum(file.size_bytes for file in files.values()),
                )
                fault = damage(partial)
            except (FileNotFoundError, ValueError) as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is None:
                self.fetch_records()
                partial.rename(folder)
                return folder
            logger.warning("the checkpoint %s is incomplete (%s): trying the one before it", url, fault)
            shutil.rmtree(partial, ignore_errors=True)
        if newer and not newest_here:
            raise RuntimeError(f"none of the {len(newer)} checkpoints in {self.url}/checkpoints is whole: restore one")
        return None

    def fetch_records(self) -> None:
        """Fetch the run's small files. Raises ValueError if there is no such run."""
        names = {name for name in sizes(self.url) if _is_record(name)} - OF_THIS_MACHINE
        if "run.json" not in names:
            raise ValueError(f"there is no run at {self.url}: it has no run.json; correct the URL")
        download_all(self.url, sorted(names - {"run.json"}), self.run_dir)
        download_all(self.url, ["run.json"], self.run_dir)

    def _manifest(self, step: int) -> CheckpointManifest:
        if step not in self._manifests:
            url = f"{self.url}/checkpoints/{step:08d}/{CHECKPOINT_MANIFEST}"
            self._manifests[step] = CheckpointManifest.parse(read_bytes(url), where=url)
        return self._manifests[step]


def _is_record(name: str) -> bool:
    return "/" not in name and name.endswith(RECORDS)


def fetch_run(url: str) -> str:
    """Fetch a run from the store into SHARDLINE_HOME, with its newest checkpoint; return its ID.

    Newer files that are here already stay. Raises ValueError if there is no such run, or if the store refuses.
    """
    run_id = run_of_url(url)
    run = RunOnStore(url.rstrip("/"), run_folder(run_id))
    try:
        if not (run.run_dir / "run.json").exists():
            run.fetch_records()
        run.fetch()
    except OSError as error:
        raise ValueError(
            f"{url} cannot be read ({error}): check the URL, the credentials that the store's library finds, and the "
            "network"
        ) from error
    return run_id
