"""Prints the files of vLLM's wheel that its subjects need where it is not installed (docs/engines-vllm.md)."""

from dsa_verify.subjects.adapters.vllm.standins import files

print("\n".join(files()))
