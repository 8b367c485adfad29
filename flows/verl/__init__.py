"""Stages as verl runs them: rows, configuration, rewards."""
