"""Every way to run a job, its memory and time, and the best one: pure arithmetic."""
