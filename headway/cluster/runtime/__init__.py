"""What adapts a job inside its ranks: the measured noise of its gradients, and another batch size."""
