"""Chunks of rounds in, findings and case files out; supervised, so that a verdict arrives or its absence is told."""
