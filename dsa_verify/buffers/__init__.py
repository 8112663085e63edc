"""The memory of a run: arenas with guards, static input buffers and how they are filled, regions and poison."""
