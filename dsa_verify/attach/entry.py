"""Entry points for the plugin loaders of engines. They import nothing but `os` unless DSA_VERIFY asks for something:
every process of every server on a machine that has dsa-verify installed comes by here."""

import os

SWITCH = "DSA_VERIFY"
STRICT = "DSA_VERIFY_STRICT"
OFF = ("", "0", "off")


def sglang() -> None:
    """SGLang's loader calls this (group `sglang.srt.plugins`), in each process, before it applies hooks."""
    _attach("sglang")


def vllm() -> None:
    """vLLM's loader calls this (group `vllm.general_plugins`), in each process."""
    _attach("vllm")


def _attach(engine: str) -> None:
    """Attach to `engine` if the environment says so. Raises nothing, but SystemExit with DSA_VERIFY_STRICT=1, which
    the loaders do not catch."""
    if os.environ.get(SWITCH, "").strip().lower() in OFF:
        return
    try:
        from dsa_verify.attach.start import start

        start(engine)
    except Exception as error:
        import sys

        text = f"dsa-verify: nothing is attached to {engine}: {type(error).__name__}: {error}"
        if os.environ.get(STRICT, "").strip() == "1":
            raise SystemExit(text) from error
        print(text, file=sys.stderr, flush=True)
