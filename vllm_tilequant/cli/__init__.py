"""The `tilequant` command. Each verb lives in its own module and is imported when it runs, so that `--help` needs no extra.

`EXIT_CODES` says what the codes mean.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, NoReturn

import typer


@dataclass(frozen=True)
class Verb:
    """Where a verb's function lies and what `tilequant --help` says of it."""

    module: str
    function: str
    help: str


VERBS = {
    "quantize": Verb("quantize", "quantize", "Quantize a model into a tilequant checkpoint."),
    "inspect": Verb("inspect", "inspect", "Show what a checkpoint is made of, and what --tp and --pp allow."),
    "verify": Verb("verify", "verify", "Read every tensor of a checkpoint and list every fault."),
    "manifest": Verb("manifest", "manifest", "Write or check SHA256SUMS of a checkpoint."),
    "diff": Verb("diff", "diff", "Compare two checkpoints: config, maps, scales, thresholds."),
    "convert": Verb("convert", "convert", "Write a checkpoint in another form, or read another form."),
    "report": Verb("report", "report", "Write an HTML page with pictures of a checkpoint."),
    "serve": Verb("serve", "serve", "Print and run the vllm serve command for a checkpoint."),
    "bench": Verb("bench", "bench", "Time a checkpoint beside its source model: TTFT, TPOT, memory."),
    "doctor": Verb("doctor", "doctor", "Print an environment block for a bug report."),
    "evaluate": Verb("evaluate", "evaluate", "Compare a checkpoint with its source model: KL, perplexity, bits."),
}
#: Importable package -> extra of vllm-tilequant that brings it.
EXTRAS = {
    "accelerate": "calibrate",
    "compressed_tensors": "calibrate",
    "datasets": "calibrate",
    "gguf": "calibrate",
    "llmcompressor": "calibrate",
    "matplotlib": "report",
    "transformers": "calibrate",
    "lm_eval": "eval",
    "vllm": "serve",
}
EXIT_CODES = (
    "Exit codes: 0 done; 1 refused, with one readable message on stderr, or what was asked is not so (verify, diff, "
    "manifest, inspect, doctor); 2 wrong usage; 3 an extra is not installed."
)
#: What our own code and the libraries raise for bad input (`FormatError` is a `ValueError`); all else is a bug and keeps its
#: traceback.
EXPECTED = (ValueError, TypeError, OSError, NotImplementedError)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: run one verb; errors for bad input become one message on stderr and an exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments  # taken anywhere on the line: it is what one adds at the end after a failure
    arguments = [a for a in arguments if a != "--debug"]
    try:
        _app(next((a for a in arguments if not a.startswith("-")), None))(arguments)
    except ModuleNotFoundError as e:
        extra = EXTRAS.get((e.name or "").partition(".")[0])
        if debug or extra is None:
            raise
        _fail(f"this needs the package {e.name}, which is not installed: pip install 'vllm-tilequant[{extra}]'", 3)
    except EXPECTED as e:
        if debug:
            raise
        _fail(str(e) or type(e).__name__, 1)


def _app(wanted: str | None) -> typer.Typer:
    """The app with one verb loaded; the others are there for `--help` and the message about an unknown verb."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(epilog=EXIT_CODES)(_options)
    for name, verb in VERBS.items():
        function: Callable[..., Any] = _not_loaded
        if name == wanted:
            function = getattr(importlib.import_module(f"{__name__}.{verb.module}"), verb.function)
        app.command(name, help=verb.help if name != wanted else _unwrapped(function.__doc__), epilog=EXIT_CODES)(function)
    return app


def _unwrapped(docstring: str | None) -> str:
    """Each paragraph on one line: the terminal decides where lines end."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", cleandoc(docstring or ""))


def _options(debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error.")) -> None:
    """Tile-mixed 4/8-bit checkpoints with graded decoding: make, judge and compare them."""


def _not_loaded() -> None:
    raise AssertionError("main() loads the verb it runs")


def _fail(message: str, code: int) -> NoReturn:
    print(f"tilequant: {message}", file=sys.stderr)
    raise SystemExit(code)
