"""What the server of tests/support/forked.py has imported for commands and servers before it forks them: not Prefect,
which reads a command's environment when it is imported.
"""

import os
import sys

os.environ["MLFLOW_LOGGING_LEVEL"] = "WARNING"  # as flows/cli/command.py sets it

import docker
import mlflow.store.tracking.sqlalchemy_store
import onnxruntime
import pandas
from matplotlib.backends import backend_agg

from flows.cli import command
from tasks.serving import server

__all__ = ["backend_agg", "command", "docker", "mlflow", "onnxruntime", "pandas", "server"]

assert "prefect" not in sys.modules
