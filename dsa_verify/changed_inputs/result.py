"""LikeEager: whether a captured callable replays like itself run eagerly, and what was observed where it does not."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from dsa_verify.base.errors import STATUS_MISMATCH, DsaVerifyError

EQUAL: Final = "equal"
VERDICTS: Final = (
    EQUAL,
    "differs",  # an element of an output
    "other form",  # dtype, shape, strides or number of outputs
    "input written",
    "wrote outside",  # the memory beside an input
    "moved",  # an input or output lies elsewhere than at the capture
    "unwritten memory",  # eager results depend on what lies in memory that was only allocated
    "not deterministic",  # eager results on equal inputs differ
    "not captured",
    "not replayed",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LikeEager:
    """The result of `dsa_verify.replays_like_eager`.

    `verdict` is one of VERDICTS, and `sentence` says what was observed, and where first. `rounds`: replays that were
    compared, the wrong one included. `batches`: the live batches of these rounds, empty without a batch dimension.
    `changed`, `kept`: paths of the inputs that were drawn anew, and of those that stayed as given. `elements`: how many
    elements of outputs were compared. `distinct`: how many different results eager work had. `path`, `index`, `got`,
    `want`, `differing`, `compared`: of the first output that differs, None elsewhere.
    """

    verdict: str
    sentence: str
    name: str
    device: str
    graph: str
    rounds: int
    batches: tuple[int, ...]
    changed: tuple[str, ...]
    kept: tuple[str, ...]
    elements: int
    distinct: int
    path: str | None = None
    index: tuple[int, ...] | None = None
    got: str | None = None
    want: str | None = None
    differing: int | None = None
    compared: int | None = None

    @property
    def equal(self) -> bool:
        """Return whether every replay was like eager work."""
        return self.verdict == EQUAL

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return dataclasses.asdict(self)


class NotLikeEager(DsaVerifyError, AssertionError):
    """A captured callable does not replay like eager work. `result`: what was observed (`dsa_verify.LikeEager`)."""

    status = STATUS_MISMATCH

    def __init__(self, result: LikeEager):
        super().__init__(f"{result.name} does not replay like eager work: {result.sentence}")
        self.result = result
