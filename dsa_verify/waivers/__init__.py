"""Findings that are known and named: the ledger, its file, and the words of a buffer that a waiver covers."""
