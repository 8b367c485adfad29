"""Promotion of models: valid verdicts, approval by a person, retraining, and notifications."""
