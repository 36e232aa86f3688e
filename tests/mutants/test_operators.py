"""Defects are injected into code alone, one at a time."""

from pathlib import Path

import pytest

from mutants.operators import find_mutants

PYTHON = '''"""Is a >= b, and not None."""

def is_more(a: int | None, b: int) -> bool:  # a >= b
    check(a)
    log.info("a >= b")
    return a is not None and a >= b
'''
SQL = """-- :name more
-- rows with a >= b
SELECT a
FROM t
WHERE a >= b
  AND b IS NOT NULL
ORDER BY a DESC;
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            PYTHON,
            [
                "pass",
                "return a is None and a >= b",
                "return a is not None and a > b",
                "return a is not None or a >= b",
            ],
        ),
        ("a.sql", SQL, ["", "AND b IS NULL", "ORDER BY a ;", "WHERE a > b"]),
        ("a.lua", "-- a == b\nif a == b then\n", ["if a ~= b then"]),
    ],
)
def test_each_defect_is_one_change_of_code(
    tmp_path: Path, name: str, text: str, expected: list[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    found = list(find_mutants(path))

    assert sorted(mutant.after for mutant in found) == sorted(expected)
    assert all(
        sum(a != b for a, b in zip(text.splitlines(), mutant.text.splitlines(), strict=True)) == 1
        for mutant in found
    )
