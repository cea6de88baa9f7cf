"""The forward benchmark: workloads, criteria, runner, page and plot. Not part of the wheel."""
