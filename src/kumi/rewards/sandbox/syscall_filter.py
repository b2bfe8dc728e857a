"""A seccomp filter that refuses system calls which lead out of limits or out of a namespace.

No test of a reply needs them. They are calls that make namespaces and mounts, that reach into other processes, that
load code into the kernel, and that keep memory which no limit of address space counts (shared memory of System V,
memfd).

The filter is a program of classic BPF; see linux/filter.h and linux/seccomp.h. The numbers of calls are those of
arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator

# Machine -> AUDIT_ARCH of linux/audit.h, and the column of `_REFUSED`.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# Call -> its numbers on x86_64 and aarch64.
_REFUSED = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "move_pages": (279, 239),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vmsplice": (278, 75),
}
# clone3 has its flags in memory, where a filter cannot read them. It is answered as if it did not exist, and C
# libraries then call clone, whose flags are its first argument.
_CLONE3, _CLONE = (435, 435), (56, 220)
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NAMESPACES = 0x20000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

# Codes of BPF instructions, offsets in struct seccomp_data, actions that a filter returns, and numbers of errors.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
# Calls of the x32 ABI have this bit.
_X32 = 0x40000000


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for `machine`, by default this one, as an array of struct sock_filter; None without one."""
    entry = _MACHINES.get(machine or platform.machine())
    if entry is None:
        return None
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(*entry))


def _instructions(arch: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (code, jump if true, jump if false, operand) of each instruction."""
    yield _LOAD, 0, 0, _ARCH_AT
    yield _IF_EQUAL, 1, 0, arch
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    yield _IF_AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, _ERRNO | _EPERM
    for numbers in _REFUSED.values():
        yield _IF_EQUAL, 0, 1, numbers[column]
        yield _RETURN, 0, 0, _ERRNO | _EPERM
    yield _IF_EQUAL, 0, 1, _CLONE3[column]
    yield _RETURN, 0, 0, _ERRNO | _ENOSYS
    yield _IF_EQUAL, 0, 3, _CLONE[column]
    yield _LOAD, 0, 0, _FIRST_ARGUMENT_AT
    yield _IF_ANY_BIT, 0, 1, _NAMESPACES
    yield _RETURN, 0, 0, _ERRNO | _EPERM
    yield _RETURN, 0, 0, _ALLOW
