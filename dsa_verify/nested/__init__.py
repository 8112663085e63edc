"""Nested objects of tensors: their parts, copies of them, and the comparison of two tensors bit by bit."""
