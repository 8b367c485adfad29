"""Where rows come from: files, directories, buckets, the hub, a function; each row with its place."""
