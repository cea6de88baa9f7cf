"""Times on a machine that is never quite quiet: timers, paired blocks, disturbance and statistics."""
