"""Training scripts that benchmarks run: plain PyTorch with costs of known size put in on purpose."""
