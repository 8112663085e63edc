"""The names, shapes and records that oracle and subject share.

Nothing here computes a value that both must work out.
"""
