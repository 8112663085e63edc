"""The optimised pipelines: Triton kernels and their assembly into subjects."""
