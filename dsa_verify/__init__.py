"""dsa-verify: replays DSA attention-metadata pipelines in live CUDA graphs beside an eager oracle."""
