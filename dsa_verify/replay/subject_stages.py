"""SubjectStages: notes which code of the subject runs, and says what the subject did wrong there.

What it does wrong before any bit could be compared (it raises, synchronises in capture, returns the wrong tensors,
keeps allocations, changes torch, forks) is a `SubjectError`, not a traceback.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final, NoReturn

from dsa_verify.base.device_lost import raise_if_lost
from dsa_verify.base.errors import CaptureError, DeviceLost, DsaVerifyError, NothingVerified, UsageError
from dsa_verify.base.torch_state import TorchState
from dsa_verify.contract import progress

# Whose frames say nothing of where in the subject an error was raised.
_CALLERS: Final = frozenset(str(Path(__file__).with_name(name)) for name in ("replayer.py", "capture.py"))


class SubjectError(DsaVerifyError):
    """The subject failed at `stage` (allocate, warm-up, capture, before_replay, replay) of `bucket`, or in one of many
    rounds (stage `rounds`), whose bucket is not known (None)."""

    status = 1

    def __init__(self, stage: str, bucket: int | None, message: str, *, kind: str, round_: int | None = None):
        super().__init__(message)
        self.stage, self.bucket, self.kind, self.round = stage, bucket, kind, round_


class SubjectStages:
    """The stages of one replayer. `slots`: this process's record (progress.py). `round`, `bucket`: the last round's."""

    def __init__(self, widest: int) -> None:
        self.slots, self._is_original = progress.current().slots, progress.mark_process()
        self.round, self.bucket = 0, widest

    def where(self) -> tuple[int, int]:
        """Return the round in progress, and its bucket."""
        return self.round, self.bucket

    def enter(self, stage: int, bucket: int) -> None:
        """Code of the subject runs from here on, in `stage` of `bucket`."""
        self.slots[progress.STAGE], self.slots[progress.BUCKET] = stage, bucket

    def back(self, stage: int, bucket: int, state: TorchState | None) -> None:
        """The subject has come back from `stage`, whose torch was as `state` before, where that was looked at."""
        self.end_if_copy(stage, bucket)
        if state is not None:
            self.refuse_change(state, progress.STAGES[stage], progress.STAGES[stage], bucket)

    def end_if_copy(self, stage: int, bucket: int) -> None:
        """End this process if it is a copy that the subject has made, and that came back."""
        if not self._is_original[0]:
            progress.current().end_copy(stage, bucket, self.slots[progress.ROUND])

    def refuse_change(
        self, state: TorchState, who: str, stage: str, bucket: int | None, cause: Exception | None = None
    ) -> None:
        """Raise SubjectError if torch is not as `state` any more; it is put back."""
        changed = state.put_back()
        if changed:
            message = f"{who} changed the {changed}, for the whole process; put it back before returning"
            kind = "changes torch's state"
            raise SubjectError(stage, bucket, message, kind=kind, round_=self.round) from cause

    def refuse_copies(self) -> None:
        """Raise SubjectError if a copy of the process came back from the subject; this one ends if it is the copy."""
        slots = self.slots
        self.end_if_copy(slots[progress.STAGE], slots[progress.BUCKET])
        if slots[progress.COPIES]:
            slots[progress.COPIES] = 0
            stage, bucket, round_ = (
                slots[slot] for slot in (progress.COPY_STAGE, progress.COPY_BUCKET, progress.COPY_ROUND)
            )
            message = progress.copy_sentence(stage, round_)
            raise SubjectError(progress.STAGES[stage], bucket, message, kind="forks", round_=max(round_, 0))

    def fail(self, error: Exception | SystemExit, number: int, bucket: int) -> NoReturn:
        """Raise the SubjectError that `error` in stage `number` is, or what else it tells of."""
        self.end_if_copy(number, bucket)
        self.slots[progress.STAGE], stage = progress.OURS, progress.STAGES[number]
        if isinstance(error, (SubjectError, DeviceLost, UsageError, NothingVerified)):
            raise error
        raise_if_lost(error)
        if isinstance(error, CaptureError):
            doing = f" while doing {error.operation}" if error.operation else ""
            kind = "raises in capture" if error.operation is None else "synchronises in capture"
            raise SubjectError(stage, bucket, f"in_graph cannot be captured{doing}: {error}", kind=kind) from error
        message = f"{stage} raised {type(error).__name__}: {error}{_place_of(error)}"
        raise SubjectError(stage, bucket, message, kind=f"raises in {stage}", round_=self.round) from error


def _place_of(error: BaseException) -> str:
    """Return where in code that is nobody's library, and not this harness, the error was raised; empty if nowhere."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "site-packages" not in each.filename and each.filename not in _CALLERS]
    return f" ({own[-1].name}, {own[-1].filename}:{own[-1].lineno})" if own else ""
