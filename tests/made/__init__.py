"""What only tests and benchmarks use: made-up jobs and models, processes for tests."""
