"""The metadata guard: what a graph reads at replay is what it captured. `dsa_verify.guard` makes one."""
