"""Where a round's time goes on a GPU: each stage of the resident loop timed alone, by replaying it many times.

python bench/stages.py [SYSTEM] [BATCH] [DRAFT_TOKENS] [CONTEXT]
"""

from __future__ import annotations

import sys
import time

import torch

from dsa_verify.base.device import choose_device


def main() -> None:
    device = choose_device("cuda")
    from dsa_verify.contract.geometry import Geometry
    from dsa_verify.graphs import open_backend
    from dsa_verify.judge.judge import Phase
    from dsa_verify.replay.setup import ReplaySetup
    from dsa_verify.rounds.matrix import diagnostic_matrix
    from dsa_verify.systems.catalogue import get_system

    system = sys.argv[1] if len(sys.argv) > 1 else "target_verify"
    batch, drafts, context = (int(text) for text in (sys.argv[2:] or ["4", "6", "4096"]))
    geometry = Geometry.resolve("deepseek_v32", {"context": context, "request_rows": 4 * batch})
    config = diagnostic_matrix(get_system(system), geometry, rounds=512 + 17, batches=[batch], drafts=[drafts])[0]
    setup = ReplaySetup.make(config.system, config.geometry, config.buckets, 0, None, None, open_backend(device))
    replayer = setup.open(512)
    tables = list(config.chunks())
    replayer.replay(tables[0])
    captured = replayer.buckets[batch]
    stages = {
        "prepare (inputs, poison)": captured.prepare,
        "oracle": captured.oracle_graph.replay,
        "subject": captured.subject_graph.replay,
        "judge": lambda: captured.judge_replay(Phase.REPLAY),
        "judge, other buckets": captured.judge_private,
    }
    for name, stage in stages.items():
        replayer.input_buffers.upload(tables[1])
        print(f"{name:<26} {_microseconds(stage, 400):8.1f} us")
    replayer.input_buffers.upload(tables[1])
    start = time.perf_counter()
    replayer.replay(tables[1])
    torch.cuda.synchronize()
    per_round = (time.perf_counter() - start) / len(tables[1])
    print(f"{'whole round':<26} {per_round * 1e6:8.1f} us, {1 / per_round:.0f} rounds/s, host included")


def _microseconds(stage: object, repeats: int) -> float:
    assert callable(stage)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        stage()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats


if __name__ == "__main__":
    main()
