"""Subjects are what is judged: our own pipelines, adapters to engines, and planted faults. They import no oracle."""
