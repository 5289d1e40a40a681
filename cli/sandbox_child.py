"""The program that `sandbox.py` starts: it gives up its rights, then runs the code on its input.

It runs by its path and only imports the standard library. The first line of the input is a word;
the process writes it to a descriptor once the code has run to its end. Arguments: that descriptor,
seconds of CPU time, bytes of memory, bytes of a file, and the id of a user without rights.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_NEW_USER, _NEW_PID, _NEW_NET, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAPABILITIES_V3, _DAC_READ_SEARCH = 0x20080522, 1 << 2
_OPEN_FILES = 64


def main() -> None:
    """Never returns."""
    writer, cpu_s, memory, file_size, nobody = map(int, sys.argv[1:])
    word, _, source = sys.stdin.buffer.read().partition(b"\n")
    libc = ctypes.CDLL(None, use_errno=True)
    _enter_namespaces(libc)
    pid = os.fork()  # the first process of a new PID namespace: its end also ends all others there
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _give_up_rights(libc, nobody)
    _limit(cpu_s, memory, file_size)
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silence, number)
    os.close(silence)
    del os.kill, os.killpg
    exec(compile(source, "answer", "exec", dont_inherit=True), {"__name__": "answer"})
    os.write(writer, word)
    os._exit(0)


def _enter_namespaces(libc: ctypes.CDLL) -> None:
    """Leaves the network and the view of other processes, as far as the kernel permits it."""
    user, group = os.geteuid(), os.getegid()
    apart = _NEW_PID | _NEW_NET | _NEW_IPC
    if user == 0:
        libc.unshare(apart)
    elif libc.unshare(_NEW_USER | apart) == 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _give_up_rights(libc: ctypes.CDLL, nobody: int) -> None:
    """Root becomes a user without rights. No capability remains, except the one to read Python's
    own files if they are in root's home; none can be gained."""
    kept = 0
    if os.geteuid() == 0:
        libc.prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(nobody, nobody, nobody)
        os.setresuid(nobody, nobody, nobody)
        kept = 0 if os.access(os.__file__, os.R_OK) else _DAC_READ_SEARCH
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = (ctypes.c_uint32 * 6)(kept, kept)  # effective, permitted and inheritable, twice
    libc.capset((ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), rights)


def _limit(cpu_s: int, memory: int, file_size: int) -> None:
    for kind, most in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
