"""The run as its operators see it: outcome, time, progress, liveness, stragglers, throughput."""
