"""Becomes a program that ends with its parent: `python -m tasks.workspace.end_with_parent PROGRAM ARGUMENT…`."""

from __future__ import annotations

import os
import sys

from tasks.workspace.processes import stop_with_parent

if __name__ == "__main__":
    stop_with_parent()  # stays in force for the program that takes this one's place
    os.execv(sys.argv[1], sys.argv[1:])
