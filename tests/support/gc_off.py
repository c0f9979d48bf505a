"""The first import of the servers that fork tests' processes: no garbage is looked for until rank_imports is done."""

import gc

gc.disable()
