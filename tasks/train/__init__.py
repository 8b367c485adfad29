"""Trainings: what all of them share, and each of its parts."""
