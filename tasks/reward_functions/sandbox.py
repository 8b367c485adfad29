"""Runs an answer's program and its tests in a process that can compute and read files, and do nothing else.

It is started as a script by ``code.py``, and imports nothing of this project. A filter of system calls (seccomp) lets
only the calls listed below through: no socket, no process or thread, no signal, no file that is opened for
writing, created, renamed or removed. The limits are of processor time, memory, and bytes written.
"""

import ctypes
import json
import os
import platform
import resource
import socket
import struct
import sys

# Numbers of the system calls that are let through, by architecture; ``open`` and ``openat`` for reading alone.
_X86_64 = (
    0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 22, 23, 24, 25, 27, 28, 32, 33, 35, 36, 38, 39,
    60, 63, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 186, 201, 202, 204, 217, 218, 219, 228, 229, 230,
    231, 262, 267, 269, 270, 271, 273, 292, 293, 318, 324, 332, 334, 439,
)  # fmt: skip
_AARCH64 = (
    17, 23, 24, 48, 57, 59, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94, 96, 98, 99, 101, 102, 103, 113, 114,
    115, 123, 124, 128, 132, 134, 135, 139, 153, 160, 163, 165, 169, 172, 173, 174, 175, 176, 177, 178, 179, 214, 215,
    216, 222, 226, 232, 233, 278, 283, 291, 293, 439,
)  # fmt: skip
# machine -> architecture in the kernel's audit, the calls, and number -> place of the flags of those that open a file
_MACHINES = {"x86_64": (0xC000003E, _X86_64, {2: 1, 257: 2}), "aarch64": (0xC00000B7, _AARCH64, {56: 2})}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | 0o20000000  # the last: O_TMPFILE
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06  # instructions of BPF
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # EPERM
_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 1, 38, 22, 2  # of prctl
_MAX_WRITTEN = 1 << 20  # bytes


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def main() -> None:
    """Reads the program from standard input; writes the token and the number of each test that passed."""
    request = json.loads(sys.stdin.buffer.read())
    token = request["token"]
    try:
        _limit(request["cpu_seconds"], request["memory_bytes"])
        _filter_calls()
        _require_filtered()
    except Exception as error:  # nothing of the answer has run
        os.write(1, f"\n{token} refused {type(error).__name__}: {error}\n".encode())
        return
    _run(request["program"], request["tests"], token)


def _run(program: str, tests: "list[str]", token: str, write=os.write, execute=exec) -> None:  # type: ignore[no-untyped-def]
    global ctypes
    os.close(0)
    del ctypes
    sys.stdout = sys.stderr = _Nowhere()
    # Compiled and numbered before the program runs, which may replace the built-in functions.
    _hide()
    numbered = [(f"\n{token} {number}\n".encode(), compile(test, "test", "exec")) for number, test in enumerate(tests)]
    namespace = {"__name__": "answer"}
    try:
        execute(compile(program, "answer", "exec"), namespace)
    except BaseException:  # an answer may raise anything, SystemExit too
        os._exit(0)
    for line, test in numbered:
        try:
            execute(test, namespace)
        except BaseException:
            continue
        write(1, line)
    os._exit(0)


def _hide() -> None:
    """Hides from the program the frames above it and the memory of the process, where the token is.

    It needs no name that the program can replace, and no hook can be removed.
    """
    for name in ("ctypes", "_ctypes"):
        sys.modules.pop(name, None)
    frames = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
    modules = frozenset({"ctypes", "_ctypes", "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_interpreters"})
    refused = frozenset({
        "sys._current_frames", "sys._current_exceptions", "sys.settrace", "sys.setprofile", "gc.get_objects",
        "gc.get_referrers", "gc.get_referents",
    })  # fmt: skip
    text, raw, number, no_frame, no = str, bytes, int, ValueError("call stack is not deep enough"), PermissionError

    def hook(event: str, args: "tuple[object, ...]") -> None:
        if event == "sys._getframe":
            raise no_frame  # which namedtuple, enum and logging expect
        is_frame = event == "object.__getattr__" and args[1] in frames
        if event in refused or is_frame or (event == "import" and args[0] in modules):
            raise no(event)
        if event == "open" and args[0].__class__ is not number:
            path = args[0]
            if path.__class__ is raw:
                path = path.decode("latin-1")
            if path.__class__ is not text or ".." in path or "//" in path or "/./" in path:
                raise no(event)
            start = path if path[:1] == "/" else "/proc" * ("proc" in path or "dev" in path)
            if start[:5] == "/proc" or start[:4] == "/dev":
                raise no(event)

    sys.addaudithook(hook)


class _Nowhere:
    """Standard output of an answer."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, _MAX_WRITTEN),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
    ):  # fmt: skip
        resource.setrlimit(kind, (limit, limit))


def _filter_calls() -> None:
    architecture, calls, opening = _MACHINES[platform.machine()]
    code = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    for number in calls:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number, place in opening.items():
        flags = 16 + 8 * place
        code += [(_JUMP_EQUAL, 0, 4, number), (_LOAD, 0, 0, flags), (_JUMP_SET, 1, 0, _WRITING),
                 (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]  # fmt: skip
    code.append((_RETURN, 0, 0, _REFUSE))
    raw = b"".join(struct.pack("HBBI", *each) for each in code)
    program = _Program(length=len(code), code=raw)
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PARENT_DEATH_SIGNAL, 9, 0, 0, 0)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if library.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl: this kernel filters no system calls")


def _require_filtered() -> None:
    """Tries calls that the filter must refuse, so that a machine where it has no effect is refused."""
    for name, attempt in (
        ("a socket", lambda: socket.socket()), ("a file for writing", lambda: os.open("/dev/null", os.O_WRONLY)),
        ("a process", os.fork), ("a signal", lambda: os.kill(os.getpid(), 0)),
        ("a folder", lambda: os.mkdir("refused")),
    ):  # fmt: skip
        try:
            attempt()
        except PermissionError:
            continue
        raise OSError(f"the filter lets {name} through")


if __name__ == "__main__":
    main()
