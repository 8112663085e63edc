"""A server in miniature, with an engine's names for what a plugin can reach."""
