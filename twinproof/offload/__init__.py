"""Optimizer state in host memory between steps: which tensors move, when, and what a checkpoint sees of them."""
