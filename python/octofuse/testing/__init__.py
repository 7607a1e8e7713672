"""Shared by tests, benchmarks and the CPU engine: the reference formula, tolerances, shapes and timing."""
