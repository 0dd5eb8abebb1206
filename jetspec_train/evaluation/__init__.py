"""Benchmark, statistics and report: what a sceptic would run before believing a speedup."""
