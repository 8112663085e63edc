class ModelRunner:
    """Makes nothing here; a process that has one is a rank."""

    def __init__(self, rank: int = 0):
        self.rank = rank
