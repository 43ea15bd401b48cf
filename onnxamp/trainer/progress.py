"""What a person sees while a run goes: one living line on a terminal, plain lines elsewhere.

Lines that stay: one per evaluation or epoch, one per skipped window with its cause and the loss scale before and
after, one at the end with the hint on the initial scale. Without a terminal (a log file, CI) a status line is
printed every half minute instead of the living one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from onnxamp.trainer.callbacks import Callback, WindowResult
from onnxamp.trainer.position import FitState

_STATUS_SECONDS = 30.0
# Between two states of the living line: drawing one takes a millisecond.
_LIVING_SECONDS = 0.25
# Skipped windows that get a line of their own before they are only counted.
_LINES = 20


def amount(seconds: float) -> str:
    """A duration as `3:07` or `1:02:45`."""
    whole = round(max(0.0, seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def scale_text(scale: float) -> str:
    """A loss scale, powers of two in full as long as they are short."""
    return f"{scale:.0f}" if scale >= 1 and scale < 1e9 and scale == int(scale) else f"{scale:.4g}"


class Progress(Callback):
    """Shows a run on `console`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._rate = 0.0
        self._loss = self._scale = float("nan")
        self._sums, self._summed = [0.0, 0.0], 0  # of losses and weights since that many windows
        self._lines = 0
        self._began = self._shown = time.monotonic()
        self._values = self._metric = ""
        self._share_before = 0.0

    def on_start(self, state: FitState) -> None:
        self._began = self._shown = time.monotonic()
        self._share_before = self._share(state) or 0.0
        self._summed = state.windows
        if self.console.is_terminal:
            self._live = Live("", console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def on_window(self, state: FitState, window: WindowResult) -> None:
        report = window.report
        self._loss, self._scale = report["loss"], report["next_loss_scale"]
        if not window.skipped:
            weight = report["weight_sum"]
            self._sums = [self._sums[0] + report["loss"] * weight, self._sums[1] + weight]
        if window.seconds > 0:
            rate = report["rows"] / window.seconds
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        if window.skipped or report["dropped"]:
            self._overflowed(state, window)
        now = time.monotonic()
        if self._live is not None:
            if now - self._shown > _LIVING_SECONDS:
                self._shown = now
                self._live.update(self._status(state), refresh=True)
        elif now - self._shown > _STATUS_SECONDS:
            self._shown = now
            self.console.print(self._words(state), highlight=False, soft_wrap=True)

    def _overflowed(self, state: FitState, window: WindowResult) -> None:
        self._lines += 1
        if self._lines > _LINES:
            if self._lines == _LINES + 1:
                self._say("  more skipped windows are only counted from here; metrics.jsonl has them all", "yellow")
            return
        before, after = window.report["loss_scale"], window.report["next_loss_scale"]
        scale = f"scale {scale_text(before)}"
        scale += f" → {scale_text(after)}" if after != before else " stays"
        dropped = int(window.report["dropped"])
        what = "skipped" if window.skipped else f"without {dropped} micro-batch{'es' * (dropped > 1)}"
        self._say(f"  window {state.windows} {what}: {window.cause}; {scale}", "yellow")

    def on_evaluate(self, state: FitState, values: Mapping[str, float]) -> None:
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        best = state.memory.get("best") or {}
        mark = "  (best)" if best.get("windows") == state.windows else ""
        self._summary(state, numbers + mark)
        self._values = numbers
        self._metric = next((f"{name} {value:.4g}" for name, value in values.items() if name != "val_loss"), "")

    def on_epoch(self, state: FitState) -> None:
        if not self._values:
            self._summary(state, "")
        self._values = ""

    def _summary(self, state: FitState, numbers: str) -> None:
        of = f"/{state.epochs}" if state.epochs is not None else ""
        parts = [f"epoch {state.last_epoch + 1}{of}", f"step {state.step}"]
        if state.windows > self._summed:  # else nothing was trained since the line before
            mean = self._sums[0] / self._sums[1] if self._sums[1] else float("nan")
            parts.append(f"loss {mean:.4g}")
        self._sums, self._summed = [0.0, 0.0], state.windows
        self._say("  ".join([*parts, *([numbers] if numbers else [])]))

    def on_end(self, state: FitState, reason: str) -> None:
        if state.windows > self._summed:
            self._summary(state, "")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=not self.console.is_terminal)

    def _share(self, state: FitState) -> float | None:
        """The part of the run that is done."""
        total = state.total_windows
        done = state.step if state.steps is not None else state.windows
        return min(1.0, done / total) if total else None

    def _words(self, state: FitState) -> str:
        of = f"/{state.epochs}" if state.epochs is not None else ""
        parts = [f"epoch {state.epoch + 1}{of}", f"step {state.step}", f"loss {self._loss:.4g}"]
        if self._metric and self.console.width >= 100:
            parts.append(self._metric)
        if self._scale != 1:
            parts.append(f"scale {scale_text(self._scale)}")
        if state.skipped:
            parts.append(f"skipped {state.skipped}")
        parts.append(f"{self._rate:,.0f} rows/s" if self._rate >= 10 else f"{self._rate:.2g} rows/s")
        share = self._share(state)
        if share is not None and share > self._share_before:
            spent = time.monotonic() - self._began
            parts.append(f"ETA {amount(spent * (1 - share) / (share - self._share_before))}")
        return "  ".join(parts)

    def _status(self, state: FitState) -> Text:
        """The words, and a bar where there is room for one."""
        share = self._share(state)
        line = Text(self._words(state), no_wrap=True, overflow="ellipsis")
        width = min(30, self.console.width - line.cell_len - 4)
        if share is not None and width >= 8:
            done, mark = round(share * width), "-" if self.console.options.ascii_only else "━"
            line.append("  ").append(mark * done, "bar.complete")
            # Without colours both parts would look alike.
            line.append((mark if self.console.color_system else " ") * (width - done), "bar.back")
        return line
