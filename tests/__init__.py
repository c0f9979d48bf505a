"""Tests. Threads of torch that wait for work sleep: by default they keep a core busy that other tests need.

Not in benchmarks, which import parts of this package and measure how fast threads are.
"""

import os
import sys

if "pytest" in sys.modules:  # before any test's process or child imports torch, which reads this once
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
