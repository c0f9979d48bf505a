"""Simulates recovery under thousands of seeded faults (tests/support/fault_simulation.py says which code is real).

    python -m benchmarks.fault_simulation [--quick | --seeds N | --seed N]

Each seed is a run on one to three hosts that meets up to eight faults, in any combination; its user starts it again
until it is done. The invariants: one attempt at a time owns the run, no row of metrics is lost or doubled, training
continues from the newest complete checkpoint, the run fails only for a cause, its recorded status is true, nothing is
left behind, and every start ends. A seed that violates one of them is printed with the command that replays it,
`--seed N`. 10,000 seeds; --quick: 2,000.

The last line is one JSON object: `seeds`, `violations` (seeds that violate an invariant) and `seconds`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from tests.support.fault_simulation import replay, simulate, simulate_many

SEEDS, QUICK = 10_000, 2_000


def show(seed: int) -> int:
    """Print what happens in one seed; return 1 if it violates an invariant, else 0."""
    outcome = simulate(seed, trace=True)
    print("\n".join(outcome.story))
    print(f"\nseed {seed}: {len(outcome.violations)} violations; faults: {', '.join(outcome.faults) or 'none'}")
    return 1 if outcome.violations else 0


def run(num_seeds: int) -> int:
    began, faults, endings, broken = time.perf_counter(), Counter[str](), Counter[str](), 0
    attempts, taken_over, simulated_s = 0, 0, 0.0
    for outcome in simulate_many(range(num_seeds)):
        faults.update(outcome.faults)
        endings.update(outcome.endings)
        attempts, taken_over = attempts + outcome.attempts, taken_over + outcome.taken_over
        simulated_s += outcome.seconds
        if outcome.violations:
            broken += 1
            print(f"seed {outcome.seed}: {outcome.violations[0]}\n    {replay(outcome.seed)}", flush=True)
    seconds = time.perf_counter() - began
    print("| | |\n|---|---|")
    print(f"| faults | {faults.total():,} of {len(faults)} kinds |")
    print(f"| starts of a run, by their end | {', '.join(f'{end} {n:,}' for end, n in endings.most_common())} |")
    print(f"| attempts | {attempts:,} |")
    print(f"| standbys that took over | {taken_over:,} |")
    print(f"| simulated time | {simulated_s / 3600:.1f} h |")
    print(json.dumps({"seeds": num_seeds, "violations": broken, "seconds": round(seconds, 1)}))
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} seeds")
    parser.add_argument("--seeds", type=int, default=0, help=f"number of seeds; default {SEEDS:,}")
    parser.add_argument("--seed", type=int, help="show what happens in this seed")
    options = parser.parse_args()
    if options.seed is not None:
        return show(options.seed)
    return run(options.seeds or (QUICK if options.quick else SEEDS))


if __name__ == "__main__":
    sys.exit(main())
