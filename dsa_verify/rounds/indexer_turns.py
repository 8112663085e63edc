"""Some configurations of a matrix turn the indexer on, and this module says which, and for which architecture.

Geometries without an indexer are the default, because most pipelines make none of its metadata. Pipelines that do are
also run with it: in every fourth configuration, by the preset that is the same but for the indexer, or once in four
turns with pools as well. Where there is an indexer, the architecture decides the form of its lengths (contract 1.2) and
which schedules exist (contract 3.2).
"""

from __future__ import annotations

import contextlib
from typing import Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.schedule_variants import VARIANTS
from dsa_verify.contract.system import System

# By preset without an indexer, those with one: alone, and with pools, which forbid requests of length 0.
INDEXED_PRESETS: Final = {
    "deepseek_v32": ("deepseek_v32_indexer", "glm53_flash"),
    "tiny": ("tiny_indexer", "tiny_pool"),
}
# By schedule of architecture 90, what takes its place on 100.
ON_100: Final = {"V4b": "V5p", "tiny": "tiny_runs"}
_POOLED_TURN: Final = 8  # the configuration, and every sixteenth after it, whose turn it is to have pools


def indexer_turn(system: System, geometry: Geometry, i: int, fixed: frozenset[str]) -> Geometry:
    """Return the geometry of configuration `i` before anything else of it turns: `geometry`, or the same with an
    indexer where it is its turn. It never is if `fixed` holds "indexer", or if the layout does not allow an indexer."""
    presets = INDEXED_PRESETS.get(geometry.preset)
    if not system.indexer or geometry.indexer or "indexer" in fixed or presets is None:
        return geometry
    if (i - i // 4) % 4 != 2:
        return geometry
    alone, pooled = presets
    # What is asked for holds, also where it is what the preset has anyway.
    settings = {**geometry.overrides(), **{key: getattr(geometry, key) for key in fixed if hasattr(geometry, key)}}
    for preset in (pooled, alone) if i % 16 == _POOLED_TURN else (alone,):
        with contextlib.suppress(UsageError):
            indexed = system.geometry(preset, settings)
            system.layout(indexed, 1)
            return indexed
    return geometry


def architecture_turn(geometry: Geometry, i: int, fixed: frozenset[str]) -> dict[str, object]:
    """Return what of `geometry` is different in configuration `i`.

    Half of those with an indexer have architecture 100 with a schedule that exists there. Nothing is different where
    "architecture" is among the `fixed`, or a schedule that does not exist there.
    """
    if not geometry.indexer or "architecture" in fixed or (i // 4 + i // 2) % 2 == 0:
        return {}
    schedule = geometry.schedule if "schedule" in fixed else ON_100.get(geometry.schedule, geometry.schedule)
    return {"architecture": 100, "schedule": schedule} if 100 in VARIANTS[schedule].architectures else {}
