"""The report on the shape of the code counts, sorts and finds duplicates."""

from __future__ import annotations

from pathlib import Path

from tests import structure


def test_sizes_duplicates_and_openings_are_reported(tmp_path: Path) -> None:
    for package, methods in (("a", 1), ("b", 30)):
        directory = tmp_path / "hpcpar" / package
        directory.mkdir(parents=True)
        body = "".join(f"    def m{i}(self, x): ...\n" for i in range(methods))
        (directory / "same.py").write_text(f'"""What is here."""\nclass Same:\n    """A class."""\n{body}')
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "test_a.py").write_text("assert True\n")
    lines = list(structure.report(tmp_path))
    assert lines[1].split() == ["b", "1", "33", "0"]
    assert lines[2].split() == ["a", "1", "4", "1"]
    text = "\n".join(lines)
    assert "classes over 25 methods: 1\n    30  hpcpar/b/same.py:2  Same" in text
    assert "file names that occur more than once: 1" in text
    assert "class names that occur more than once: 1" in text
    assert "hpcpar/a/same.py:1  What is here." in text
