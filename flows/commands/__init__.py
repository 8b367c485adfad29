"""One module per command of ``posttrain``: ``add_arguments(parser)`` and ``run(options) -> exit code``."""
