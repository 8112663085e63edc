"""A process of SGLang's that has no model."""

import sys

from sglang.srt.plugins import load_plugins

load_plugins()
print("dsa_verify.attach.start" if "dsa_verify.attach.start" in sys.modules else "nothing")
