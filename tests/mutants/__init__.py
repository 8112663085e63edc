"""Mutants: small defects made in our own pipelines and oracles, to measure what `replay` and `fuzz` can see.

`python -m tests.mutants --help` runs them; docs/mutants.md says what for.
"""
