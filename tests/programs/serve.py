"""`python -m tests.programs.serve REF TRACKING_URI SERVERS_DIR CONFIG FILES`: a server as `shardline serve` starts it.

CONFIG is a ServeConfig as JSON; FILES is how many files it may open, 0 for as many as its parent.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from tasks.serving.server import serve
from training.config.serving import ServeConfig


def main(ref: str, tracking_uri: str, servers_dir: str, config: str, files: str) -> None:
    if limit := int(files):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    settings = ServeConfig.model_validate(json.loads(config))
    serve(ref, port=0, tracking_uri=tracking_uri, servers_dir=Path(servers_dir), config=settings)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
