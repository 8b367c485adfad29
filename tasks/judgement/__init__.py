"""What is known of a training before it runs: advice, memory, time, disk, and its rows."""
