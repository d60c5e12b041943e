"""Measurements of the product on real processes; see ``docs/benchmarks.md``."""
