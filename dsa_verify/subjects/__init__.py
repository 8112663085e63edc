"""Subjects are what is judged: the project's own pipelines, adapters to engines, and planted faults. No oracle is
imported here."""
