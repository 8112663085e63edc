"""Outputs are compared here on the device: field by field, and by the laws that every schedule obeys."""
