"""A loader in miniature: it runs what an entry point names, goes on if that raises, then applies hooks."""

import traceback
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry


def load_plugins() -> None:
    for found in entry_points(group="sglang.srt.plugins"):
        try:
            found.load()()
        except Exception:
            traceback.print_exc()
    HookRegistry.apply_hooks()
