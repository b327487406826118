"""The entry point of the `agalite` command and of `python -m agalite`.

Ctrl-C ends it cleanly from the first moment, so nothing that takes time is imported here.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    try:
        # Where SIGINT is ignored, as in background jobs of a script, it stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        # `cli.main` blocks Ctrl-C while the process restarts itself; from here on it is handled.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        from agalite.cli import main

        return main()
    except KeyboardInterrupt:
        print("agalite: interrupted", file=sys.stderr)
        return 130


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raises `KeyboardInterrupt`, but exits at once during an import.

    Nothing needs saving then, and an exception inside an import may be replaced or lost, or crash
    the interpreter.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"agalite: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
