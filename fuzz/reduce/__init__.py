"""A finding made small, and what it depends on put into words."""
