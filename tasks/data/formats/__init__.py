"""The shapes in which users bring rows: told apart, converted into one form per kind, checked."""
