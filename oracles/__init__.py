"""Eager PyTorch references, one file per system, and the NumPy referee that checks them."""
