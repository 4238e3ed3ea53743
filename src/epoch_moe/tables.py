"""`Table`: rows of values that print as aligned text, and show as HTML in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | int | float | None


@dataclass(frozen=True, repr=False)
class Table:
    """A table: its first column holds labels, the others values.

    Attributes:
        header: titles of the columns; that of the first may be empty.
        rows: values as they were computed, as many per row as the header has. Numbers are rounded for display only;
            None shows as an empty cell.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"row {row!r} has {len(row)} cells: expected {len(self.header)}, as in the header")

    def column(self, title: str) -> dict[str, Cell]:
        """One column by the title in the header: label of a row -> its value."""
        if title not in self.header[1:]:
            raise KeyError(f"no column {title!r}: there are {', '.join(map(repr, self.header[1:]))}")
        place = self.header.index(title, 1)
        return {str(row[0]): row[place] for row in self.rows}

    def __str__(self) -> str:
        lines = [self.header, *(tuple(map(cell_text, row)) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "   ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__  # what a terminal shows of the last expression

    def _repr_html_(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            first, *others = map(html.escape, cells)
            values = "".join(f'<{tag} style="text-align:right">{cell}</{tag}>' for cell in others)
            return f'<tr><th style="text-align:left">{first}</th>{values}</tr>'

        body = "".join(line("td", [cell_text(cell) for cell in row]) for row in self.rows)
        return f"<table><thead>{line('th', self.header)}</thead><tbody>{body}</tbody></table>"


def cell_text(value: Cell) -> str:
    """A value as a cell shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value
