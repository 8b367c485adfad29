"""The generated tables of the pages in docs/."""
