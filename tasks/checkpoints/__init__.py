"""When a training saves and stops, which model becomes its output, and what that takes of the disk."""
