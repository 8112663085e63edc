"""The graphs under the guard: emulated ones on a CPU, and real ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from dsa_verify.graphs import Backend, open_backend


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def graphs(request: pytest.FixtureRequest) -> Backend:
    if request.param == "emulated":
        return open_backend(torch.device("cpu"), "emulated")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return open_backend(torch.device("cuda", torch.cuda.current_device()))
