"""The tar in a layer of the store, of which parts are read without the rest."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import BinaryIO

from bundle.format.layer import Entry, Index, LayerError

from .layer_file import decompress_index

_KEPT = 3
"""Frames that are kept: a library's first, its tables, and its strings are read in turn."""


class StoredTar:
    """Random access to what the frames of a layer hold, by decompressing the few that are asked."""

    def __init__(self, layer: BinaryIO, head_size: int, index: Index) -> None:
        self._layer = layer
        self._frames = index.frames
        self._places = list(accumulate((frame.size for frame in index.frames), initial=head_size))
        self._starts = list(accumulate((f.unpacked_size for f in index.frames), initial=0))
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def file(self, entry: Entry, at: int, size: int) -> bytes:
        """Return bytes from a place in a file, fewer at its end.

        Raises:
            LayerError: a frame is damaged.
            OSError: the layer cannot be read.
        """
        position = entry.offset + at
        end = min(position + size, entry.offset + entry.size)
        data = b""
        while position < end:
            number = bisect_right(self._starts, position) - 1
            start = position - self._starts[number]
            piece = self._frame(number)[start : start + end - position]
            if not piece:
                raise LayerError("a frame is shorter than the index says")
            data += piece
            position += len(piece)
        return data

    def _frame(self, number: int) -> bytes:
        if number not in self._kept:
            if number >= len(self._frames):
                raise LayerError("a file lies behind the last frame")
            self._layer.seek(self._places[number])
            self._kept[number] = decompress_index(self._layer.read(self._frames[number].size))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]
