"""The stop of this process, one for all its runs as its signals are: how it is hurried, and what it ended."""

import threading

hurried = threading.Event()  # whoever asked for a stop asked again: stages that save are not waited for
ended: list[str] = []  # of each stage what it goes on from: ``sft saved at step 9``
