"""`python -m tests.programs.speaking WORD…`: says what it was given, more from a thread and at its end; exits with 3.

The word `wait`: it waits for a signal first.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading

if __name__ == "__main__":
    atexit.register(print, "at its end")
    print(sys.argv[1:], sorted(os.environ.items()), os.getcwd(), os.getsid(0) == os.getpid(), flush=True)
    if "wait" in sys.argv:
        signal.pause()
    threading.Timer(0.1, print, ("from a thread",)).start()
    print("to stderr", file=sys.stderr)
    sys.exit(3)
