"""Declare: a system of a user's own, as one class with inputs, outputs, a reference and subjects."""
