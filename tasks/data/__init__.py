"""Data of users: reading, conversion to one form, checks and splits, tokenization.

The packages in the order of processing: ``reading`` -> ``formats`` -> ``preparing`` -> ``tokens``.
"""
