"""A system of a user's own is one value in one file: replayed, fuzzed, shrunk and diagnosed like the others."""

import torch
from support import backend

from dsa_verify.contract.geometry import Geometry
from dsa_verify.contract.layout import Field, Layout, Row
from dsa_verify.contract.system import System
from dsa_verify.replay.setup import ReplaySetup
from dsa_verify.rounds.case_file import read_case
from dsa_verify.systems.catalogue import SYSTEMS
from fuzz.fuzzer import fuzz
from fuzz.reduce.shrink import shrink
from fuzz.reduce.trials import Signature


def layout(geometry, bucket):
    given = {"shape": (bucket + 1,), "row": Row.REQUEST_PREFIX, "section": "1.7", "low": -(2**31), "high": 2**31}
    fields = tuple(Field(name=f"sums_{dtype}", dtype=dtype, **given) for dtype in ("int32", "int64"))
    return Layout(system="prefix_sums", geometry=geometry, bucket=bucket, tokens=bucket, fields=fields)


class Sums:
    name, short = "sums", 0

    def allocate(self, geometry, inputs, buffers):
        self.inputs, self.out = inputs, buffers

    def before_replay(self): ...

    def in_graph(self):
        lens = self.inputs.seq_lens.long() << 25  # so that int32 wraps at 64 tokens (contract 1.7)
        self.out["sums_int64"].copy_(torch.cat([lens[:1] * 0, lens.cumsum(0)]))
        self.out["sums_int32"].copy_(self.out["sums_int64"].to(torch.int32))
        self.out["sums_int32"][-1:].sub_(self.short)


class Oracle(Sums):
    def in_graph(self):
        lens = self.inputs.seq_lens.long()
        sums = (lens * torch.ones(len(lens) + 1, len(lens), dtype=torch.int64).tril(-1)).sum(1) * 2**25
        self.out["sums_int64"].copy_(sums)
        self.out["sums_int32"].copy_(((sums + 2**31) % 2**32 - 2**31).int())


Short = type("Short", (Sums,), {"short": 1})  # whose last sum is one too small
NAMES = {"oracle": f"{__name__}:Oracle", "subjects": {"triton": f"{__name__}:Sums"}}
SYSTEM = System(name="prefix_sums", summary="", layout=layout, **NAMES)


def test_a_system_in_a_file_of_its_own(dsa, tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "prefix_sums", SYSTEM)
    dsa.verify("prefix_sums", Sums, batches=[5], rounds=40)
    tiny = Geometry.resolve("tiny")
    right, wrong = (ReplaySetup.make(SYSTEM, tiny, (5, 2), 0, made, None, backend()) for made in (None, Short))
    ((), (finding,)) = (fuzz(setup, 60, folder=tmp_path).findings for setup in (right, wrong))
    small = shrink(read_case(tmp_path / finding.case), Signature.of(finding), backend(), subject=Short)
    assert (finding.field, len(small.scenario.rounds), small.scenario.system) == ("sums_int32", 1, "prefix_sums")
