"""What importing the package does: modules of the compiler that were loaded, and files that were written or opened."""

from __future__ import annotations

import sys
from typing import Any

import torch  # noqa: F401 - what torch itself does at import is not ours

OPENED: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode = arguments[0], arguments[1]
        if isinstance(path, str) and mode is not None and any(letter in mode for letter in "wax+"):
            OPENED.append(path)
    if event in ("os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        OPENED.append(f"{event} {arguments}")


def main() -> None:
    sys.dont_write_bytecode = True
    sys.addaudithook(watch)
    import flowpool  # noqa: F401, PLC0415

    compilers = sorted(name for name in ("numba", "llvmlite") if name in sys.modules)
    print(",".join(compilers) or "none")
    print(OPENED or "none")


if __name__ == "__main__":
    main()
