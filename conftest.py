"""What all tests of this project share: a GPU for each worker, and the interpreter where there is no GPU."""

# ruff: noqa: E402 (the order is the point)

from dsa_verify.base.gpu_pinning import pin_gpu

pin_gpu()  # before the next import: once CUDA is initialised, a worker can no longer be given a GPU of its own

import os
import signal

import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it starts in the background, and so would every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated, so before any test module

pytest_plugins = ["pytester"]
