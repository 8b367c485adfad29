"""Reading of rows from files, directories, buckets, the hub, and functions."""
