"""Step primitives: one training session whose steps another program calls."""
