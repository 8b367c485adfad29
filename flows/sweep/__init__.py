"""Sweeps: trials of one pipeline that differ in a few fields and share all other stages."""
