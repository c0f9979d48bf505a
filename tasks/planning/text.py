"""What a plan says of text that is not tokenized yet: how much it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.display.numbers import format_count
from training.records.token_shards import TokenShards
from training.records.words import counted
from training.shards.format import SPLITS
from training.shards.packing import Epoch


@dataclass(frozen=True)
class TextEstimate:
    """The text of a corpus, by shards that were made of a sample of it as a run makes them.

    `shards`: the manifest of all text, as far as the sample tells it. `sample`: the manifest of the sample; its counts
    of what was left out, skipped and lost are of the part that was read, `read_bytes` of the files. `epochs`: one of
    each source; none if one of them is on the hub. `is_counted`: the sample is all of the text.
    """

    name: str
    shards: TokenShards
    sample: TokenShards
    epochs: tuple[Epoch, ...]
    is_counted: bool
    read_bytes: float

    def lines(self) -> Iterator[str]:
        """Yield sentences for the plan."""
        for part, name in enumerate(self.shards.parts or (self.name,)):
            yield self._size(part, name)
        if not self.is_counted:
            yield from (f"text: {hint}" for hint in self.shards.split_hints())
        read = "" if self.is_counted else "in the part that was read, "
        yield from self.sample.ledger_lines(read=read, read_bytes=round(self.read_bytes))

    def _size(self, part: int, name: str) -> str:
        """Return what the text of one source is; a document that is cut between both splits is one in each."""
        about = "" if self.is_counted else "about "
        own = [shard for shard in self.shards.shards if (shard.part or 0) == part]
        sample = sum(shard.text_bytes for shard in self.sample.shards if (shard.part or 0) == part)
        size = sum(shard.text_bytes for shard in own)
        files = sum(file.name.startswith(f"{name}/") for file in self.shards.sources if self.shards.parts)
        how = "all of it was read" if self.is_counted else f"from a sample of {sample / 1e6:,.2f} MB"
        train, held_out = (
            f"{about}{format_count(self.shards.tokens_of_part(part, split))} tokens of "
            f"{counted(sum(shard.documents for shard in own if shard.split == split), 'document')}"
            for split in SPLITS
        )
        return (
            f"text: {name}: {counted(files or len(self.shards.sources), 'file')}, {about}{size / 1e6:,.1f} MB; "
            f"{train} to train on, {held_out} held out ({how}; it is not tokenized yet)"
        )
