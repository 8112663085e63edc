"""One file a system: its fields, inputs and rules; and the catalogue of systems, oracles and subjects."""
