"""Copies that go past the CPU's caches.

memmove reads what it is about to overwrite, and puts it into caches where the next step of training needs the room. A
save is not read again soon, so it is written with non-temporal stores: less memory traffic, and one call for a whole
table of copies, without the GIL. Neither Python nor libc offers such a call, so its machine code is below; where the
processor is another one, or the system allows no code made at run time, memmove does the work.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import sys
from typing import Any, Callable, Optional

log = logging.getLogger("dlrover.ckpt")

ROW = 24  # bytes of a row: destination, source, length, 64 bits each
ALIGN = 16  # alignment of destinations

# void copy(const struct row *rows, size_t count), System V calling convention, SSE2 and nothing newer.
_X86_64 = bytes.fromhex(
    "f30f1efa"      # endbr64
    "4885f67460"    # test rsi, rsi; jz done
    "4989f84989f1"  # mov r8, rdi; mov r9, rsi
    # next:
    "498b38"        # mov rdi, [r8]
    "498b7008"      # mov rsi, [r8+8]
    "498b5010"      # mov rdx, [r8+16]
    "4983c018"      # add r8, 24
    "4889d1"        # mov rcx, rdx
    "48c1e9067433"  # shr rcx, 6; jz tail
    # block:
    "f30f6f06"      # movdqu xmm0, [rsi]
    "f30f6f4e10"    # movdqu xmm1, [rsi+16]
    "f30f6f5620"    # movdqu xmm2, [rsi+32]
    "f30f6f5e30"    # movdqu xmm3, [rsi+48]
    "660fe707"      # movntdq [rdi], xmm0
    "660fe74f10"    # movntdq [rdi+16], xmm1
    "660fe75720"    # movntdq [rdi+32], xmm2
    "660fe75f30"    # movntdq [rdi+48], xmm3
    "4883c640"      # add rsi, 64
    "4883c740"      # add rdi, 64
    "48ffc975cd"    # dec rcx; jnz block
    # tail:
    "89d183e13f"    # mov ecx, edx; and ecx, 63
    "f3a4"          # rep movsb
    "49ffc975a9"    # dec r9; jnz next
    "0faef8"        # sfence
    # done:
    "c3"            # ret
)


@functools.lru_cache(maxsize=None)
def copier() -> Optional[Callable[[int, int], Any]]:
    """The function (address of rows, number of rows) that copies them all. None: there is none here.

    Source and destination of a row must not overlap, and its destination is a multiple of ALIGN.
    """
    if os.uname().machine not in ("x86_64", "AMD64") or sys.maxsize <= 1 << 32:
        return None
    try:
        memory = _executable(_X86_64)
    except (OSError, ValueError) as e:
        log.debug("memmove copies: %s", e)
        return None
    copy = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(ctypes.addressof(memory))
    copy.memory = memory  # type: ignore[attr-defined]  # the code lives as long as the function
    return copy


def _executable(code: bytes) -> Any:
    """Memory that holds the code, and can be run and no longer be written."""
    pages = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(code)
    memory = (ctypes.c_char * mmap.PAGESIZE).from_buffer(pages)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(ctypes.addressof(memory), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "this process may not run code that it has made")
    return memory
