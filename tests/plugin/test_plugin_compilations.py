"""--dsa-allow-compilations."""

from __future__ import annotations

LATE = """
from dsa_verify.replay import compilations
from dsa_verify.subjects.pipelines.basic import Decode

class Late(Decode):
    def before_replay(self):
        compilations._note(None, {})

def test(dsa): dsa.verify('decode', Late, batches=(1,), rounds=2)
"""


def test_a_late_compilation_fails_a_test_unless_it_is_allowed(session) -> None:
    result = session(LATE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*recompiles: bucket *: ?.? was compiled again *; a server would stall there*"])
    session(LATE, "--dsa-allow-compilations").assert_outcomes(passed=1)
