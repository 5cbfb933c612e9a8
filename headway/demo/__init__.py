"""The script that `headway demo` runs: ordinary PyTorch that has never heard of headway."""
