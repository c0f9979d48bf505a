"""Tests. Threads of torch that wait for work sleep: by default they keep a core busy that other tests need."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, when torch is imported
