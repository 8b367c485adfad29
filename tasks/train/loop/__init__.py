"""The training loop: arguments, steps, callbacks, checkpoints."""
