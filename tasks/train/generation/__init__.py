"""Completions of a policy in training: sampled, scored and checked."""
