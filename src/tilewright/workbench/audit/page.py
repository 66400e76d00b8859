"""Render an audit as one self-contained HTML page: numbers, findings, and a map of every tensor."""

from __future__ import annotations

import base64
import json
import linecache
import math
import zlib
from html import escape
from pathlib import Path

import numpy as np

from tilewright.cost import size
from tilewright.interpreter.results import SECTOR, Finding, Launch, Traffic

_TEMPLATE = Path(__file__).with_name("page.html")
_CELLS = 256  # maximum width and height of a map
_COLOURS = 8  # length of PROGRAMS in the template; one more colour marks several programs


def render(title: str, launches: list[Launch], summary: list[str], findings: list[Finding] | None = None) -> str:
    """Return the page. Findings that belong to no launch are at the top, the others with their launch."""
    listed = [f for launch in launches for f in launch.findings]
    loose = [f for f in findings or [] if f not in listed]
    count = len(listed) + len(loose)
    verdict = f'<p class="verdict bad">{_counted(count, "finding")}' if count else '<p class="verdict">No findings'
    body = [
        f"<header><h1>{escape(title)}</h1>{verdict}</p>",
        *(f"<p>{escape(sentence)}</p>" for sentence in summary),
        f"{_findings(loose)}{_contents(launches) if len(launches) > 1 else ''}</header>",
        *(_launch(number, launch) for number, launch in enumerate(launches, 1)),
    ]
    page = _TEMPLATE.read_text(encoding="utf-8")
    return page.replace("<!-- title -->", escape(title)).replace("<!-- body -->", "\n".join(body))


def _contents(launches: list[Launch]) -> str:
    rows = [
        f'<tr><td>{number}<td><a href="#launch-{number}"><code>{escape(launch.kernel)}</code></a>'
        f"<td>{_times(launch.grid)}<td>{size(sum(t.moved for t in launch.arguments.values()))}"
        f"<td>{f'<b class=bad>{len(launch.findings)}</b>' if launch.findings else 'none'}"
        for number, launch in enumerate(launches, 1)
    ]
    return f"<nav><table><tr><th>Launch<th>Kernel<th>Grid<th>Bytes moved<th>Findings{''.join(rows)}</table></nav>"


def _launch(number: int, launch: Launch) -> str:
    touched = [t for t in launch.arguments.values() if t.lanes or t.moved]
    idle = [f"<code>{escape(t.name)}</code>" for t in launch.arguments.values() if not (t.lanes or t.moved)]
    meta = "".join(f"<li><code>{escape(str(k))}={escape(str(v))}</code>" for k, v in launch.meta.items())
    return "\n".join(
        [
            f'<section id="launch-{number}"><h2><code>{escape(launch.kernel)}</code></h2>',
            f'<p class="where"><code>{escape(f"{launch.file}:{launch.line}")}</code></p>',
            f'<ul class="facts"><li>grid {_times(launch.grid)}<li>{_counted(launch.programs, "program")}{meta}</ul>',
            _findings(launch.findings),
            f'<div class="tensors">{"".join(_card(_TensorMap(t), launch.grid) for t in touched)}</div>',
            f'<p class="idle">Not touched: {", ".join(idle)}</p>' if idle else "",
            "</section>",
        ]
    )


def _findings(findings: list[Finding]) -> str:
    items = []
    for f in findings:
        program = f", program {f.program}" if f.program is not None else ""
        where = f"<p><code>{escape(f'{f.file}:{f.line}')}</code></p>" if f.line else ""
        source = linecache.getline(f.file, f.line).strip()  # empty where the file cannot be read
        items.append(
            f"<li><p><b>{escape(f.kind)}</b> <code>{escape(f.argument)}</code> in <code>{escape(f.kernel)}</code>"
            f"{escape(program)}: {escape(f.detail)} ({_counted(f.lanes, 'lane')})</p>{where}"
            f"{f'<pre>{escape(source)}</pre>' if source else ''}"
        )
    return f'<ul class="findings">{"".join(items)}</ul>' if items else ""


class _TensorMap:
    """A tensor as at most 256 x 256 cells: the last dimension across, all others down; a vector is wrapped."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.shape = tuple(traffic.tensor.shape)
        self.count = math.prod(self.shape)
        self.wrapped = len(self.shape) < 2
        if self.wrapped:
            self.step = 1, _step(self.count, _CELLS * _CELLS)
            cells = -(-self.count // self.step[1])
            self.columns = min(cells, next(w for w in (64, 128, _CELLS) if cells <= w * w))
            self.width = self.columns * self.step[1]
        else:
            self.width = self.shape[-1]
            height = math.prod(self.shape[:-1])
            self.step = _step(height, _CELLS), _step(self.width, _CELLS)
            if min(height, self.width) >= max(self.step) * _CELLS // 4:  # otherwise square cells would be too few
                self.step = max(self.step), max(self.step)
            self.columns = -(-self.width // self.step[1])
        self.rows = -(-self.count // (self.width * self.step[0])) if self.count else 0
        self.cells: list[np.ndarray] = []
        self.read, self.written = bool(np.any(traffic.reads)), bool(np.any(traffic.writer))
        if self.read:
            self.cells += [self._reduced(np.minimum, traffic.reads), self._reduced(np.maximum, traffic.reads)]
        if self.written:
            gap = traffic.writer == 0
            first = self._reduced(np.minimum, np.where(gap, np.iinfo(np.int32).max, traffic.writer))
            last, gaps = self._reduced(np.maximum, traffic.writer), self._reduced(np.add, gap)
            colours = np.where(first == last, _colours(last), _COLOURS + 1)
            self.cells += [first, last, gaps, np.where(gaps > 0, 0, colours)]

    def _reduced(self, how: np.ufunc, per_element: np.ndarray) -> np.ndarray:
        cells = per_element.reshape(-1, self.count if self.wrapped else self.width)
        for axis in (1, 0):  # the other order takes eight times as long
            cells = how.reduceat(cells, np.arange(0, cells.shape[axis], self.step[axis]), axis, np.int64)
        return np.pad(cells.ravel(), (0, self.rows * self.columns - cells.size)).reshape(self.rows, self.columns)

    def note(self) -> str:
        """Return a note on how to read the map."""
        if self.wrapped:
            notes = [_counted(self.count, "element") + (f" in rows of {self.width:,}" if self.rows > 1 else "")]
        else:
            notes = [f"{self.width:,} across, {_times(self.shape[:-1])} down"]
        if math.prod(self.step) > 1:
            step = f"{self.step[1]:,}" if self.wrapped else _times(self.step)
            notes.append(f"each cell is {step} elements: their maximum reads; hatched if any was not written")
        if any(stride == 0 and size > 1 for stride, size in zip(self.traffic.tensor.stride(), self.shape, strict=True)):
            notes.append("a dimension with stride 0 repeats the same memory")
        return "; ".join(notes) + "."


def _colours(programs: np.ndarray) -> np.ndarray:
    """Return a colour from 1 for the program (+ 1) of each cell, different from those of neighbouring programs."""
    present, numbers = np.unique(programs, return_inverse=True)
    grid = numbers.reshape(programs.shape)
    beside: list[set[int]] = [set() for _ in present]
    straight = (grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])
    diagonal = (grid[1:, 1:], grid[:-1, :-1]), (grid[1:, :-1], grid[:-1, 1:])
    for here, there in straight + diagonal:
        for a, b in np.unique(np.stack([here, there], -1)[here != there], axis=0).tolist():
            beside[max(a, b)].add(min(a, b))
    colours: list[int] = []
    for program, others in zip(present.tolist(), beside, strict=True):
        first = program - 1 if len(present) <= 64 else 0  # all colours for few programs, a calm texture for many
        wishes = [1 + (first + k) % _COLOURS for k in range(_COLOURS)]
        taken = {colours[other] for other in others}
        colours.append(next((colour for colour in wishes if colour not in taken), wishes[0]) if program else 0)
    return np.array(colours)[grid]


def _card(shown: _TensorMap, grid: tuple[int, int, int]) -> str:
    t = shown.traffic
    fetched = t.sectors * SECTOR
    numbers = {
        "Loaded": (size(t.loaded), ""),
        "Stored": (size(t.stored), ""),
        "Atomic": (size(t.atomic), ""),
        "Reads per element": (f"{t.reads_per_element:,.2f}", "of those read"),
        "Distinct read": (size(t.distinct_read), ""),
        "Distinct written": (size(t.distinct_written), ""),
        "Masked lanes": (f"{t.masked / max(t.lanes, 1):.1%}", f"of {t.lanes:,}"),
        "Sector bytes": (size(fetched), f"{fetched / max(t.moved, 1):.2f} × {size(t.moved)} used"),
    }
    tiles = "".join(
        f"<div><dt>{k}</dt><dd{' class=zero' if v == '0 B' else ''}>{v}<small>{note}</small></dd></div>"
        for k, (v, note) in numbers.items()
    )
    spec = {k: getattr(shown, k) for k in ("shape", "count", "width", "rows", "columns", "step", "read", "written")}
    spec |= {
        "name": t.name,
        "grid": grid,
        "unread": shown.count - int(np.count_nonzero(t.reads)),
        "unwritten": shown.count - int(np.count_nonzero(t.writer)),
        "cells": base64.b64encode(zlib.compress(np.array(shown.cells, "<u4").tobytes(), 9)).decode(),
    }
    described = f"{_times(shown.shape) or 'scalar'} · {t.tensor.dtype} · strides {tuple(t.tensor.stride())}"
    return (
        f"<article{' class=both' if shown.read and shown.written else ''}><h3><code>{escape(t.name)}</code></h3>"
        f'<p class="where">{escape(described.replace("torch.", ""))}</p><dl>{tiles}</dl>'
        f'<div class="maps" data-spec="{escape(json.dumps(spec))}"></div>'
        f'<p class="note">{escape(shown.note())}</p><output></output></article>'
    )


def _step(count: int, most: int) -> int:
    """Return the smallest power of two of which `most` cover `count`, so that cells divide tiles."""
    return 1 << max(0, -(-count // most) - 1).bit_length()


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _times(sizes: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)
