"""Long runs in supervised worker processes: plan, shards, journal, report."""
