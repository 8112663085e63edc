"""A loader in miniature: it runs what an entry point names, and does not go on if that raises."""

from importlib.metadata import entry_points


def load_general_plugins() -> None:
    for found in entry_points(group="vllm.general_plugins"):
        found.load()()
