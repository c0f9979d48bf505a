"""Readers, one for each format of source: they yield documents, and name file and line of an unreadable one.

A reader reads one span of a file independently of the spans before and after it: the bytes around the span's ends
determine which documents, or parts of documents, belong to it.

Text, JSON lines and CSV are read by the small readers here, not by `datasets`: its text and JSON builders name no file
or line for an unreadable document, and cannot leave out a single line; its CSV builder takes short rows for empty text,
shifts the columns when the first row is too long, and counts rows where an editor counts lines.
"""

from tasks.data.readers.documents import CONTEXT_CHARACTERS, LONGEST_PIECE
from tasks.data.readers.read import read_spans
from tasks.data.readers.spans import Piece, Place, Span

__all__ = ["CONTEXT_CHARACTERS", "LONGEST_PIECE", "Piece", "Place", "Span", "read_spans"]
