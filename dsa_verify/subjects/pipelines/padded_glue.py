"""DSV4-style metadata behind a glue graph: prepared by the captured graph where the engine may, eagerly where it must
(contract 7.4)."""

from __future__ import annotations

from dsa_verify.contract.glue_route import GlueConditions, Preparation, Release, Route
from dsa_verify.subjects.pipelines.padded import Padded


class Glued(Padded):
    """Draft and target-verify preparation declare DSV4 glue, which takes padded batches; decode has the generic glue,
    which does not; an idle batch never goes through a graph. `glue_conditions` says so to the verifier, which works
    out the route on its own."""

    name = "glue"
    release = Release.PR_47676

    def route(self, raw_batch: int) -> Route:
        """The way that this engine prepares a replay of `raw_batch` live requests."""
        padded = raw_batch < self._buffers.layout.bucket
        return Route.EAGER if raw_batch == 0 or (padded and self._preparation() is Preparation.GENERIC) else Route.GLUE

    def glue_conditions(self, raw_batch: int) -> GlueConditions:
        """What the route depends on, as this engine was started."""
        return GlueConditions(
            raw_batch=raw_batch,
            bucket=self._buffers.layout.bucket,
            preparation=self._preparation(),
            generic_switch=True,
            target_verify_switch=True,
        )

    def _preparation(self) -> Preparation:
        of_mode = {"decode": Preparation.GENERIC, "verify": Preparation.DSV4_TARGET_VERIFY}
        return of_mode.get(self._geometry.padded_mode, Preparation.DSV4_DRAFT)
