"""What a pretrained model's folder has beside config, weights and tokenizer: an export gets its licence."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from training.records.plan import RunPlan

LICENCE = re.compile(r"(licen[cs]e|notice|copying|copyright|use_policy)", re.IGNORECASE)
MADE_ANEW = re.compile(
    r"\.|config\.json|generation_config\.json|(model|pytorch_model)\b.*(\.safetensors|\.index\.json)|tokenizer\.json|"
    r"tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|chat_template\.|additional_chat_templates"
)
MOST_NAMED = 12


def carry_files(plan: RunPlan, folder: Path) -> dict[str, str]:
    """Copy the licence of the model that was trained further to `folder`. Return what else its folder has that neither
    the export nor a file of its own has, and why it is not there.
    """
    if plan.config.model.init != "pretrained":
        return {}
    path = plan.local(plan.config.model.path)
    try:
        source, names = _files_of(path)
    except Exception as error:  # of a hub that does not answer: each raises another type
        return {"files of model.path": f"those of {path} could not be listed ({type(error).__name__}: {error})"}
    for name in filter(LICENCE.match, names):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    others = [name for name in names if not MADE_ANEW.match(name) and not (folder / name).exists()]
    return {"files of model.path": _not_carried(others)} if others else {}


def _files_of(path: str) -> tuple[Path, list[str]]:
    """Return a local folder with the licence, and the names of all that the model's folder, or the hub, has."""
    if Path(path).is_dir():
        return Path(path), sorted(each.name for each in Path(path).iterdir())
    from huggingface_hub import list_repo_files, snapshot_download

    names = sorted({name.partition("/")[0] for name in list_repo_files(path)})
    return Path(snapshot_download(path, allow_patterns=[*filter(LICENCE.match, names)] or ["LICENSE"])), names


def _not_carried(names: Iterable[str]) -> str:
    named = list(names)
    more = f" and {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
    return (
        f"{', '.join(named[:MOST_NAMED])}{more}: beside config, weights, tokenizer and licence of the text model that "
        "was trained nothing is carried over: copy what is still true of it"
    )
