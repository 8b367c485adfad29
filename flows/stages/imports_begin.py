"""The first module that the fork server imports.

Its other imports take a third less time without garbage collection; the processes that it forks turn it on again
(``stage_main``). The signals that are for the driver were blocked when it was started, and are ignored from here on.
"""

import gc
import signal

gc.disable()
_blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
for _number in _blocked:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, _blocked)
