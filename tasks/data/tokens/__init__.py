"""From prepared rows to the tokens of a trainer: the trained part of each row, lengths, packing, the cache."""
