"""`python -m infra.secrets_to_env COMMAND …`: reads secrets from files into the environment, then executes the command.

NAME_FILE=/run/secrets/x becomes NAME, as in Postgres' image, so that `docker inspect` and compose.yaml show only the
path. This is done only for files in a folder called `secrets`, because SSL_CERT_FILE and others name no secrets. An
empty file leaves NAME unset.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SUFFIX, FOLDER = "_FILE", "secrets"


def with_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with NAME for each NAME_FILE. Exits, naming the file, if one cannot be read."""
    result = dict(environment)
    for name, value in environment.items():
        path = Path(value)
        if not (name.endswith(SUFFIX) and path.parent.name == FOLDER):
            continue
        try:
            secret = path.read_text().strip()
        except OSError as error:
            sys.exit(f"{name} = {path} cannot be read ({error.strerror}): is it there, and uid {os.getuid()}'s?")
        del result[name]
        if secret:
            result[name.removesuffix(SUFFIX)] = secret
    return result


def main(command: list[str]) -> None:
    if not command:
        sys.exit(__doc__)
    os.execvpe(command[0], command, with_secrets(os.environ))


if __name__ == "__main__":
    main(sys.argv[1:])
