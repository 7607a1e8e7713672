"""For tests and benchmarks alone: tolerances, shapes, host times and the record of a measurement."""
