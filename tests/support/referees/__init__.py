"""Referees: the contract in plain Python integers and loops, which tests check the oracles with.

A referee imports no oracle.
"""
