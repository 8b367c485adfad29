"""Formats of users' rows: detection, checks, conversion to one form per kind."""
