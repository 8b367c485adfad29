"""The commands of ``posttrain``: of each ``add_NAME(parser)`` and ``run_NAME(options) -> exit code``."""
