"""Text and HTML output of the commands."""
