"""Configurations of other trainers."""
