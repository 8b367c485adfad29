"""The progress of a run: on the screen, in the run record, in the logs."""
