"""What the server of tests/support/forked.py has imported for commands and servers before it forks them: not Prefect,
which reads a command's environment when it is imported.
"""

import os
import sys
from importlib import import_module

from tests.support import forked

os.environ["MLFLOW_LOGGING_LEVEL"] = "WARNING"  # as flows/cli/command.py sets it
before = {*os.environ}
for name in (
    *("docker", "matplotlib.backends.backend_agg", "mlflow.store.tracking.sqlalchemy_store", "onnxruntime", "pandas"),
    *("flows.cli.command", "tasks.serving.server"),
):
    import_module(name)
assert "prefect" not in sys.modules
forked.set_by_imports |= {name: value for name, value in os.environ.items() if name not in before}
