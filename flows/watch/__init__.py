"""What starts a run when nobody types a command: the clock, new data, an event."""
