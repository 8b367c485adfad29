"""Losses, and the trainers that compute them."""
