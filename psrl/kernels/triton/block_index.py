"""Which key tiles each block of queries visits: the host side of the Triton kernels.

The rows of a tile give four bounds, the bounds give lists of visits, and a tile that a block of
queries sees whole needs no mask. Built with numpy once per micro-batch, for all layers.

Dimension letters: T queries, N key rows, K key tiles, B query blocks, V visits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from psrl.core.samples.sample import IntArray
from psrl.kernels.attention.key_rows import KeyRows

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class KeyTiles:
    """K tiles of neighbouring rows in one buffer.

    Attributes:
        row: [K] first row of each tile.
        query_start, query_end: [K, block_k] queries that see each row; equal where none does.
    """

    row: Int32Array
    query_start: Int32Array
    query_end: Int32Array


def key_tiles(rows: KeyRows, block_k: int) -> KeyTiles:
    """Cover the rows with tiles of `block_k` rows, greedily from the first row on."""
    begins_run = np.diff(rows.row, prepend=-2) > 1
    run_start, run_last = rows.row[begins_run], rows.row[np.roll(begins_run, -1)]
    first: list[int] = []
    for start, last in zip(run_start.tolist(), run_last.tolist(), strict=True):
        first.extend(range(max(start, first[-1] + block_k) if first else start, last + 1, block_k))
    tile_row = np.array(first, np.int32)
    tile = np.searchsorted(tile_row, rows.row, side="right") - 1
    slot = rows.row - tile_row[tile]
    start, end = np.zeros((2, len(tile_row), block_k), np.int32)
    start[tile, slot], end[tile, slot] = rows.query_start, rows.query_end
    return KeyTiles(tile_row, start, end)


def query_ranges(tiles: KeyTiles, num_queries: int, block_q: int) -> Int32Array:
    """[K, 4] query blocks of each tile: begin, begin of the mask-free ones, their end, end.

    Blocks outside see no row of the tile. They are one range for local rows; for cached rows of
    several branches there may be blocks between that see nothing, which costs time only.
    """
    num_blocks = -(-num_queries // block_q)
    live = tiles.query_end > tiles.query_start
    any_start = np.where(live, tiles.query_start, num_queries).min(1, initial=num_queries)
    any_end = tiles.query_end.max(1, initial=0)
    all_start = np.where(live, tiles.query_start, num_queries).max(1, initial=0)
    all_end = tiles.query_end.min(1, initial=num_queries)
    begin, end = any_start // block_q, -(-any_end // block_q)
    free_begin = -(-all_start // block_q)
    free_end = np.where(all_end == num_queries, num_blocks, all_end // block_q)
    is_free = free_end > free_begin
    return np.stack(
        [begin, np.where(is_free, free_begin, end), np.where(is_free, free_end, end), end], axis=1
    ).astype(np.int32)


def longest_first(num_visits: IntArray) -> Int32Array:
    """Launch order in which the longest programs start first and the short ones fill the gaps."""
    return np.argsort(-num_visits, kind="stable").astype(np.int32)


@dataclass(frozen=True)
class QueryIndex:
    """Visits of query blocks to key tiles, for the forward and the dQ kernel.

    Attributes:
        offsets: [B, 5] visits of a block: begin and end of the mask-free cached ones, end of the
            masked cached ones, end of the mask-free local ones, end of the masked local ones.
        row: [V] first row of the visited tile in its buffer.
        slot: [V] where the tile's rows begin in `query_start` and `query_end`.
        query_start, query_end: rows of all tiles, cached ones first.
        order: [B] launch order.
    """

    offsets: Int32Array
    row: Int32Array
    slot: Int32Array
    query_start: Int32Array
    query_end: Int32Array
    order: Int32Array


def query_index(
    cached: KeyRows, local: KeyRows, num_queries: int, block_q: int, block_k: int
) -> QueryIndex:
    """Lists of visits; `cached` rows are addressed in the store's buffer, `local` ones by token."""
    num_blocks = -(-num_queries // block_q)
    sources = [key_tiles(rows, block_k) for rows in (cached, local)]
    first_tile = (0, len(sources[0].row))
    visits: list[tuple[IntArray, IntArray]] = []
    for tiles, shift in zip(sources, first_tile, strict=True):
        begin, free_begin, free_end, end = query_ranges(tiles, num_queries, block_q).T
        tile, block = _expand(free_begin, free_end)
        visits.append((tile + shift, block))
        before, after = _expand(begin, free_begin), _expand(free_end, end)
        tile, block = (np.concatenate(pair) for pair in zip(before, after, strict=True))
        visits.append((tile + shift, block))
    counts = np.stack([np.bincount(block, minlength=num_blocks) for _, block in visits], axis=1)
    offsets = np.zeros((num_blocks, 5), np.int64)
    offsets[:, 1:] = np.cumsum(counts).reshape(counts.shape)
    offsets[1:, 0] = offsets[:-1, 4]
    tile, block = (np.concatenate(column) for column in zip(*visits, strict=True))
    # The narrowest type: numpy sorts 16-bit integers in linear time.
    by_block = np.argsort(block.astype(np.min_scalar_type(num_blocks)), kind="stable")
    tile = tile[by_block]
    tile_row = np.concatenate([tiles.row for tiles in sources])
    return QueryIndex(
        offsets.astype(np.int32),
        tile_row[tile],
        (tile * block_k).astype(np.int32),
        np.concatenate([tiles.query_start.ravel() for tiles in sources]),
        np.concatenate([tiles.query_end.ravel() for tiles in sources]),
        longest_first(counts.sum(1)),
    )


def _expand(begin: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """All pairs (tile, block) with `begin[tile] <= block < end[tile]`."""
    count = (end - begin).astype(np.int64)
    tile = np.repeat(np.arange(len(count)), count)
    first_pair = np.cumsum(count) - count
    return tile, np.arange(len(tile)) + np.repeat(begin - first_pair, count)


@dataclass(frozen=True)
class KeyIndex:
    """Query blocks that each key tile of one buffer visits, for the dK/dV kernel.

    Attributes:
        row: [K] first row of each tile.
        query_start, query_end: [K * block_k] rows of all tiles.
        ranges: [K, 4] as in `query_ranges`.
        order: [K] launch order.
    """

    row: Int32Array
    query_start: Int32Array
    query_end: Int32Array
    ranges: Int32Array
    order: Int32Array


def key_index(rows: KeyRows, num_queries: int, block_q: int, block_k: int) -> KeyIndex:
    """Ranges of query blocks per key tile."""
    tiles = key_tiles(rows, block_k)
    ranges = query_ranges(tiles, num_queries, block_q)
    return KeyIndex(
        tiles.row,
        tiles.query_start.ravel(),
        tiles.query_end.ravel(),
        ranges,
        longest_first(ranges[:, 3] - ranges[:, 0]),
    )
