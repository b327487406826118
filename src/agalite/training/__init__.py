"""Training runs: configuration, the training loop, checkpoints, logs and evaluation."""
