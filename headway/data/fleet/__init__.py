"""Preparation by worker processes, here and on other machines: master, workers, readers, and who starts them."""
