"""The formats of users' rows: detected, converted into one form per kind, checked."""
