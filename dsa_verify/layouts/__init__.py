"""The contract's tables as `Layout`s, one file per group of systems."""
