"""Codecs of gradients: functions from flat tensors to bytes and back."""
