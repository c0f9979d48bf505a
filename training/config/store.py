"""The store section of the config: an object store that keeps what a machine makes."""

from __future__ import annotations

from pydantic import Field

from training.config.section import Section


class StoreConfig(Section):
    """An object store, or a folder on another disk, where token shards and checkpoints outlive this machine."""

    url: str = ""
    """URL of a folder (s3:// gs:// az:// file://) to which files are copied in the background: token shards to
    URL/tokens, each run's records and checkpoints to URL/runs/RUN. `shardline resume URL/runs/RUN` continues a run on
    any machine. Empty copies nothing.
    """
    cache_gib: float = Field(50.0, gt=0)
    """Disk space, in GiB, for the blocks of token shards that ranks of this machine read from the store; the oldest
    blocks make room for new ones.
    """
