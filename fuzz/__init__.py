"""A serving engine in miniature: draws the histories that a metadata pipeline is replayed through."""
