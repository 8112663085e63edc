"""From a difference to a finding: it is replayed again, placed, and put into words."""
