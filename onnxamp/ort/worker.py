"""One worker process for sessions on models that may crash the runtime.

ONNX Runtime can end its process (a segmentation fault) while it optimizes a valid 16-bit model. The worker takes one request
after another; if it dies it is started again, and a request that died at the default optimization level is tried once more
at ``extended``, which the answer then says.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from onnxamp.errors import AmpError, InternalError
from onnxamp.ort.session import LOW_OPTIMIZATION, Model, SessionConfig, loadable, open_session, run

# Not multiprocessing: that would import the user's __main__ again. The path is handed over, so that the same onnxamp loads.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from onnxamp.ort.worker import serve; serve()"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of one request.

    Attributes:
        results: For each sample, output name → array; empty if the request failed.
        error: Why it failed, in one sentence; empty if it did not.
        kind: The class of the error (`ModelError`: does not load, `UnsupportedError`: no kernel, `DataError`: does not run);
            empty for a crash.
        note: What to know of a success: the optimization level that worked after a crash.
        crashed: The runtime ended its process at least once.
    """

    results: list[dict[str, Any]]
    error: str = ""
    kind: str = ""
    note: str = ""
    crashed: bool = False


class Worker:
    """A process that loads and runs models on request; use it as a context manager or call `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self,
        model: Model,
        samples: Sequence[Mapping[str, Any]] = (),
        config: SessionConfig | None = None,
        outputs: Sequence[str] | None = None,
    ) -> Answer:
        """Load `model` and run it on each of `samples`.

        Args:
            model: A path, bytes, `ModelProto` or `ir.Model`.
            samples: Feeds, one mapping a run; none means: only load it.
            config: Session options; ONNX Runtime's defaults on the CPU where None. A crash is tried again at ``extended`` only
                from the level ``all``.
            outputs: Names of the outputs wanted; all where None.

        Raises:
            MemoryError: There is not enough of it in the worker.
            InternalError: The worker fails in a way that is none of the runtime's.
        """
        config = config or SessionConfig(provider="cpu", optimization="all")
        with self._lock, tempfile.TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder:
            source = loadable(model, folder)
            answer = self._ask(source, samples, config, outputs)
            if not answer.crashed or config.optimization != "all":
                return answer
            again = self._ask(source, samples, dataclasses.replace(config, optimization=LOW_OPTIMIZATION), outputs)
            if again.error:
                return dataclasses.replace(again, crashed=True)
            note = (
                f"ONNX Runtime ends its process on this file at its default optimization level ({answer.error}): set "
                "SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED, with which it runs "
                "(onnxamp itself does)."
            )
            return dataclasses.replace(again, note=note, crashed=True)

    def close(self) -> None:
        """Stop the process, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the end of its input is its end
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask(self, source: str | bytes, samples: Sequence[Mapping[str, Any]], *rest: Any) -> Answer:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            # Both ends are ours; nothing that comes from a file is ever unpickled.
            pickle.dump((source, [dict(sample) for sample in samples], *rest), process.stdin, protocol=5)
            process.stdin.flush()
            status, value = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            self.close()
            return Answer([], error=f"its process ended with {_exit_text(code)}", crashed=True)
        except BaseException:  # an interrupt: the answer that still comes must not be read as that of the next request
            process.kill()
            self.close()
            raise
        if status == "memory":
            raise MemoryError(value)
        if status == "internal":
            raise InternalError(f"The session worker failed: {value}.")
        return Answer(value) if status == "ok" else Answer([], error=value, kind=status)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._process


@functools.cache
def shared() -> Worker:
    """The worker of this process; it is started at the first request and stopped at exit."""
    worker = Worker()
    atexit.register(worker.close)
    return worker


def serve() -> None:
    """Answer requests on stdin until it ends (the other side of `Worker`)."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the runtime may print; stdout is for answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes stdin
    requests = sys.stdin.buffer
    while True:
        try:
            source, samples, config, outputs = pickle.load(requests)
        except EOFError:
            return
        try:
            session = open_session(source, config)
            answer: tuple[str, Any] = ("ok", [run(session, sample, outputs) for sample in samples])
        except AmpError as problem:
            answer = (type(problem).__name__, str(problem))
        except MemoryError as problem:
            answer = ("memory", str(problem))
        except Exception as problem:  # whatever it is, the parent raises it as an internal error
            answer = ("internal", f"{type(problem).__name__}: {problem}")
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
