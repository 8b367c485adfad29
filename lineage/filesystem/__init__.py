"""Files and directories: atomic writes, digests, locks, free space, remote files."""
