"""What is done with a finished model: chat with it, export it, serve it."""
