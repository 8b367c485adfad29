"""What will run, and why: sources pinned, stages fingerprinted, the store asked. Nothing heavy is imported."""
