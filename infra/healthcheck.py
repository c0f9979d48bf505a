"""`python -m infra.healthcheck URL`: exit code 0 if URL answers 200 within 5 s. Health check of Shardline's containers.

It uses the standard library, because the serving image has no httpx and a container runs the check every few seconds.
"""

from __future__ import annotations

import sys
import urllib.request

TIMEOUT_S = 5


def main(url: str) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            sys.exit(0 if answer.status == 200 else f"{url} answered {answer.status}")
    except OSError as error:
        sys.exit(f"{url}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
