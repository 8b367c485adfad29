"""What is told of a run: to the screen, to its note, and to who asks later."""
