"""Eager PyTorch references, one file per system."""
