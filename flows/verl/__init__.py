"""Export of stages to verl: rows, configuration, rewards."""
