"""Tables: aligned text, HTML, values."""

import pytest

from epoch_moe.tables import Table, cell_text

TABLE = Table(("", "a", "b / a"), (("rows", 1234567, 0.25), ("long name", None, 1.0), ("<kind> & more", "x", 12.345)))


def test_text_is_aligned() -> None:
    assert str(TABLE).splitlines() == [
        "                        a   b / a",
        "rows            1,234,567   0.250",
        "long name                   1.000",
        "<kind> & more           x    12.3",
    ]
    assert repr(TABLE) == str(TABLE)


def test_html_is_escaped() -> None:
    page = TABLE._repr_html_()
    assert page.count("<tr>") == 4 and "&lt;kind&gt; &amp; more" in page and "<kind>" not in page
    assert '<td style="text-align:right">1,234,567</td>' in page


def test_columns_give_values_back() -> None:
    assert TABLE.column("a") == {"rows": 1234567, "long name": None, "<kind> & more": "x"}
    with pytest.raises(KeyError, match="no column 'c': there are 'a', 'b / a'"):
        TABLE.column("c")


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 cells: expected 2"):
        Table(("", "a"), (("rows",),))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-1500, "-1,500"), (0.5, "0.500"), (9.9996, "10.000"), (1234.56, "1,234.6"), (None, ""), ("x", "x")],
)
def test_numbers_are_rounded_for_display(value: object, text: str) -> None:
    assert cell_text(value) == text  # type: ignore[arg-type]
