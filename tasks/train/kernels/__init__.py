"""A training's use of its machine: precision, attention without padding, fast layers."""
