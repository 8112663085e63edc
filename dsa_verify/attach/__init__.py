"""The attachment to a server: an engine's plugin loader calls it, and the environment says whether it does anything."""
