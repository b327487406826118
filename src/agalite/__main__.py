"""The `agalite` command, and `python -m agalite`: with a clean end on Ctrl-C from the first moment.

Nothing is imported here that takes time.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    try:
        # Where it is ignored, as in a script's background jobs, it stays so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        # `cli.main` holds Ctrl-C back while the process starts itself again; here it may come.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        from agalite.cli import main

        return main()
    except KeyboardInterrupt:
        print("agalite: interrupted", file=sys.stderr)
        return 130


def _interrupt(_: int, frame: FrameType | None) -> None:
    """As Python does it, except during an import: there is nothing to save or to tidy up yet, and
    an exception there comes out as another one, is lost, or ends in a crash."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"agalite: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
