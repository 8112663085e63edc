"""Adapters to code that this project does not own; every import of theirs is optional."""
