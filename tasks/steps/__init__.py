"""What a training says of each step: its numbers, and that it goes on."""
