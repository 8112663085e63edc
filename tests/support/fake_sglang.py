"""A tree that can be imported as SGLang, for tests where there is none: functions of its names and arguments, whose
bodies are this page's own and no more than contract 1 and 4 says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

KERNELS: Final = """
import torch


def _sums(lengths, out):
    out[:1].zero_()
    out[1 : len(lengths) + 1].copy_(lengths.cumsum(0))


def _dsa(lengths, topk, pool):
    whole = lengths // pool * pool
    return whole.clamp(max=topk) + lengths - whole


def _tables(table, real, rows, width, page):
    count = len(rows)
    if table is not None:
        table[:count, :width].copy_(rows[:, :width])
    if page > 1:
        real[:count].copy_(rows[:, :width:page] // page)


def _fill(mode, seq_lens, req_pool_indices, req_to_token, cache_seqlens, cu_seqlens_k, page_table_1, dsa_cache_seqlens,
          dsa_cu_seqlens_k, real_page_table, bs, dsa_index_topk, physical_page_size, width, queries, expanded=None,
          index_kpool=1):
    assert seq_lens.is_cuda and req_to_token.is_cuda
    assert bs == len(seq_lens)
    owner = torch.arange(bs).repeat_interleave(queries)
    draft = torch.arange(len(owner)) - (queries.cumsum(0) - queries)[owner]
    lengths = seq_lens.int() + (int(queries[0]) if mode == "verify" else 0)
    cache_seqlens.copy_(lengths)
    _sums(lengths, cu_seqlens_k)
    rows = (lengths[owner] - queries[owner].int() + draft.int() + 1).clamp(min=0) if expanded is not None else lengths
    if expanded is not None:
        expanded[: len(rows)].copy_(rows)
    sparse = _dsa(rows, dsa_index_topk, index_kpool)
    dsa_cache_seqlens[: len(rows)].copy_(sparse)
    _sums(sparse, dsa_cu_seqlens_k)
    _tables(page_table_1, real_page_table, req_to_token[req_pool_indices.long()][owner], width, physical_page_size)


def fused_dsa_decode_metadata(*, max_len, **rest):
    _fill("decode", width=max_len, queries=torch.ones(rest["bs"], dtype=torch.int64), **rest)


def fused_dsa_target_verify_metadata(*, max_seqlen_k, next_n, seqlens_expanded, paged_mqa_ctx_lens_2d=None, **rest):
    _fill("verify", width=max_seqlen_k, queries=torch.full((rest["bs"],), next_n), expanded=seqlens_expanded, **rest)
    if paged_mqa_ctx_lens_2d is not None:
        paged_mqa_ctx_lens_2d.copy_(rest["cache_seqlens"][:, None].expand(-1, next_n))


def fused_dsa_draft_extend_metadata(*, max_seqlen_k, extend_seq_lens, seqlens_expanded, total_len, max_extend_len,
                                    max_total_len, static_extend_len, **rest):
    queries = extend_seq_lens.long()
    assert int(queries.sum()) == total_len <= max_total_len and int(queries.max()) <= max_extend_len
    assert not static_extend_len or len(set(queries.tolist())) == 1
    _fill("extend", width=max_seqlen_k, queries=queries, expanded=seqlens_expanded, **rest)
"""
POOLED: Final = KERNELS + "\n\n{name}_kpool = {name}\n"
KPOOL: Final = """
import torch


def build_pooled_page_table_64(table, pool):
    return table[:, ::pool] // pool


def update_kpool_write_plan_cuda_graph(*, write_start, req_pool_indices, real_page_table, req_out, write_start_out,
                                       tail_logical_start_out, write_loc_out, pool_seqlens_per_q_out,
                                       seqlens_per_q_out, kpool, num_draft_tokens, index_page_size):
    start = write_start.long()
    req_out.copy_(req_pool_indices)
    write_start_out.copy_(start)
    tail_logical_start_out.copy_(start // kpool * kpool)
    pool = start[:, None] // kpool + torch.arange(write_loc_out.shape[1])
    column = (pool // index_page_size * kpool).clamp(0, real_page_table.shape[1] - 1)
    page = real_page_table[::num_draft_tokens].long().gather(1, column) // kpool
    write_loc_out.copy_(page * index_page_size + pool % index_page_size)
    if seqlens_per_q_out is not None:
        seqlens_per_q_out.copy_((start[:, None] + torch.arange(1, num_draft_tokens + 1)).flatten())
        pool_seqlens_per_q_out.copy_(seqlens_per_q_out // kpool)
"""
_DSA: Final = "kernels/ops/attention/dsa"
TREE: Final = {
    "version.py": '__version__ = "0.5.23"\n',
    f"{_DSA}/metadata.py": KERNELS,
    f"{_DSA}/kpool_metadata/decode.py": POOLED.replace("{name}", "fused_dsa_decode_metadata"),
    f"{_DSA}/kpool_metadata/verify.py": POOLED.replace("{name}", "fused_dsa_target_verify_metadata"),
    f"{_DSA}/kpool_metadata/draft_extend.py": POOLED.replace("{name}", "fused_dsa_draft_extend_metadata"),
    "srt/layers/attention/dsa/kpool_fp8_index.py": KPOOL,
}


def lay_out(folder: Path, files: dict[str, str]) -> None:
    """Write `files` (path below the package -> text) as a package `sglang` in `folder`."""
    for name, text in files.items():
        path = folder / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()


@contextmanager
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, `sglang` is what lies in `folder` and nothing else, whatever this machine has."""
    from dsa_verify.subjects.adapters import traced
    from dsa_verify.subjects.adapters.sglang import wheel

    def forget() -> dict[str, object]:
        wheel._without_cuda_assertions.cache_clear()
        names = [name for name in sys.modules if name.partition(".")[0] == "sglang"]
        return {name: sys.modules.pop(name) for name in names}

    others = forget()
    with monkeypatch.context() as patch:
        others_left_out = [place for place in sys.path if not (Path(place) / "sglang" / "__init__.py").exists()]
        patch.setattr(sys, "path", [str(folder), *others_left_out])
        importlib.invalidate_caches()
        for module in (wheel, traced):
            patch.setattr(module, "package_version", lambda name: None if name == "sglang" else "1.0")
        try:
            yield
        finally:
            forget()
            sys.modules.update(others)  # type: ignore[arg-type]
