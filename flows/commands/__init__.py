"""The commands of ``posttrain``: ``add_NAME(parser)`` and ``run_NAME(options) -> exit code`` of each."""
