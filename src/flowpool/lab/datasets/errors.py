"""What can be wrong with a dataset that came from outside, each with its own name."""

from __future__ import annotations


class DatasetFormatError(ValueError):
    """A dataset's text is malformed; ``file`` and ``line`` (counted from 1) say where."""

    def __init__(self, file: str, line: int, problem: str) -> None:
        super().__init__(file, line, problem)
        self.file = file
        self.line = line
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.problem}"


class ArchiveError(ValueError):
    """An archive or folder is refused: it is damaged, unsafe, or lacks an expected file."""


class ChecksumError(ValueError):
    """A downloaded dataset is not the one whose checksum is known."""


class DatasetNotFoundError(FileNotFoundError):
    """A dataset is in none of the places where it could be."""
