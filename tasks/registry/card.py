"""The verdict in a version's card: its description in MLflow, whose page begins with the verdict and each gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.display.markdown import escape_markdown
from tasks.registry.tags import GATE

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

GAP = "&emsp;"  # MLflow's page shows tables without space between columns
# The first word (plain, because MLflow's table of versions shows it as text), and the end of the verdict's part.
VERDICT_BEGINS, RULE = "Verdict: ", "\n\n---\n\n"
DESCRIPTION_CHARS = 5000  # MLflow's limit for a version's description, which Postgres enforces
VERDICT_CHARS, GATE_CHARS = 800, 600  # the tags have the whole texts


def with_verdict(version: ModelVersion, text: str, *, judged: str) -> str:
    """Return the version's description with this verdict on top, in place of an earlier one.

    `judged`: time and person.
    """
    card = version.description or ""
    if card.startswith(VERDICT_BEGINS):
        card = card.partition(RULE)[2]
    gates = {key.removeprefix(GATE): value for key, value in sorted(version.tags.items()) if key.startswith(GATE)}
    lines = [f"{VERDICT_BEGINS}{escape_markdown(text[:VERDICT_CHARS])} ({escape_markdown(judged)})"]
    if gates:
        lines += ["", "| gate | result |", "|---|---|"]
        lines += [f"| {gate} | {GAP}{escape_markdown(value[:GATE_CHARS])} |" for gate, value in gates.items()]
    return ("\n".join(lines) + RULE + card)[:DESCRIPTION_CHARS]
