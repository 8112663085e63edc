"""A registry in miniature: hooks around methods, put there when they are applied."""

import enum
import functools
import pkgutil
from typing import ClassVar


class HookType(enum.Enum):
    AROUND = "around"


class HookRegistry:
    registered: ClassVar[list] = []

    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.AROUND
        cls.registered.append((target, hook))

    @classmethod
    def apply_hooks(cls):
        while cls.registered:
            target, hook = cls.registered.pop()
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, _around(getattr(owner, name), hook))


def _around(original, hook):
    @functools.wraps(original)
    def around(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return around
