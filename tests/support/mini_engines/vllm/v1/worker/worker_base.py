class WorkerWrapperBase:
    """One process of a server that has a device."""

    def init_device(self):
        self.device_is_there = True
