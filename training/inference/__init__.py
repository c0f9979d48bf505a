"""Text generation by torch: samples by all ranks of a run, and whole models in one process."""
