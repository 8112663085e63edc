"""Captures a bucket of oracle and subject, replays rounds in it, and says what was seen."""
