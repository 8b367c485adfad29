"""Data of users, on its way to a trainer: read, brought into one form, checked and split, tokenized.

The rooms, in the order in which a row passes them: ``reading`` -> ``formats`` -> ``preparing`` -> ``tokens``.
"""
