"""SGLang's whole multi-step draft backend as a subject: n - 1 backends of draft steps, refreshed from one record by its
fused copies to one and to three of them, or step by step from the first (contract 2).

Whatever the copies leave stale is visible here, contract 2.3's schedule and top-k plan of the first three steps above
all. The backend prints and goes on by another way when a copy cannot be launched; here that is an error, because what
was verified would not be what its name says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dsa_verify.base.errors import UsageError
from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.subject import Inputs
from dsa_verify.subjects.adapters.sglang import wheel
from dsa_verify.subjects.adapters.sglang.backend import MODULES, BackendSubject, record_names
from dsa_verify.subjects.adapters.sglang.backend_engine import Engine
from dsa_verify.subjects.adapters.sglang.backend_stubs import BACKEND, COPIES, PRECOMPUTE
from dsa_verify.systems.indexer import destination_prefix

COPY_FUNCTIONS: Final = ("fused_metadata_copy_cuda", "fused_metadata_copy_multi_cuda")
TREE_WIDTH: Final = 1  # draft tokens that a step keeps: a chain


class StepsEngine(Engine):
    """An engine of several steps, whose copies may not fail in silence."""

    def __init__(self, make: Callable[[], Any], **rest: Any):
        self._failures: list[Exception] = []
        super().__init__(make, **rest)
        copies = wheel.require(COPIES)
        replaced = {name: value for owner, name, value in self._changes if owner is copies}
        for name in COPY_FUNCTIONS:
            function = replaced.get(name) or wheel.attribute(COPIES, name)
            self._changes.append((copies, name, self._noting_failures(function)))

    def refresh(self, batch: Any, *, in_capture: bool) -> None:
        super().refresh(batch, in_capture=in_capture)
        if self._failures:
            error = self._failures[0]
            raise UsageError(
                f"SGLang's fused metadata copy raised {type(error).__name__}: {error}; the backend then copies field "
                "by field, which is not what this subject is for"
            ) from error

    def _noting_failures(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except Exception as error:
                self._failures.append(error)
                raise

        return noting


class MtpBackend(BackendSubject):
    """Contract 2.1 to 2.4."""

    name = "sglang:mtp_backend"
    draft_worker = True
    modules = (*MODULES, PRECOMPUTE, COPIES)
    engine_class = StepsEngine

    def _refuse(self, geometry: Geometry) -> None:
        super()._refuse(geometry)
        if not geometry.wide_table:
            raise UsageError(
                f"subject {self.name!r}: draft steps are refreshed from the wide table; leave wide_table true"
            )

    def _engine_for(self, geometry: Geometry, inputs: Inputs) -> Engine:
        """Each batch size has its own backend: steps share tables between batch sizes, which mtp's layout forbids."""
        return self._new_engine(geometry, inputs)

    def _construct(self, runner: Any, geometry: Geometry) -> Any:
        make = wheel.attribute(BACKEND, "DeepseekSparseAttnMultiStepBackend")
        return make(runner, topk=TREE_WIDTH, speculative_num_steps=geometry.draft_steps)

    def _source(self) -> dict[str, Any]:
        """Return the source by the name of the draft step in the layout."""
        return {destination_prefix(step).rstrip("_"): record for step, record in enumerate(self._records)}

    def _names(self) -> dict[str, str]:
        names = {}
        for field in self._layout:
            step, _, name = field.name.partition("_")
            names[field.name] = f"{step}.{record_names([name]).get(name, name)}"
        return names
