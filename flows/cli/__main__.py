"""`python -m flows.cli`: the `shardline` command."""

import sys

from flows.cli.command import main

sys.exit(main())
