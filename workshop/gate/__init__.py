"""Judges every compiled kernel by rules, and by what is recorded in benchmarks/compile/."""
