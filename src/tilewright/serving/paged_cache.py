"""A KV cache in pages, which sequences share until one of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.ops.decode._append import Append, append_in_torch, append_kv
from tilewright.ops.decode._validate import is_eligible


class PagedCache:
    """Keys and values of sequences in pages of equal size, for all layers of a model.

    A sequence is a number below `sequences`: the row of `lengths` and of `block_table`, whose memory never moves, so
    that a CUDA graph which reads them is replayed after every change. `keys` and `values` are [layers, pages, page,
    heads, D]. Pages are counted on the host: no call reads from the GPU.

    A step reserves room for its new tokens, lets every layer write them with `decode_attention(…, k_new=, v_new=)`, and
    then advances. `append` does all of it at once.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        pages: int,
        page: int = 64,
        sequences: int,
        capacity: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        """Allocate all pages. `capacity` is the largest number of tokens of a sequence."""
        sizes = {"layers": layers, "heads": heads, "head_size": head_size, "pages": pages, "page": page}
        for name, size in (sizes | {"sequences": sequences, "capacity": capacity}).items():
            if size < 1:
                raise ValueError(f"{name} must be positive, not {size}")
        shape = (layers, pages, page, heads, head_size)
        self.page = page
        self.capacity = capacity
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.block_table = torch.zeros(sequences, -(-capacity // page), dtype=torch.int32, device=device)
        self._free_pages = [*range(pages - 1, -1, -1)]
        self._free_sequences = [*range(sequences - 1, -1, -1)]
        self._users = [0] * pages  # sequences that a page belongs to
        self._pages: dict[int, list[int]] = {}  # by sequence
        self._tokens: dict[int, int] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        self._require(sequence)
        return self._tokens[sequence]

    def allocate(self) -> int:
        """Return a new, empty sequence."""
        if not self._free_sequences:
            raise RuntimeError(f"all {len(self._tokens)} sequences are in use: free one first")
        sequence = self._free_sequences.pop()
        self._pages[sequence], self._tokens[sequence] = [], 0
        self._publish([sequence])
        return sequence

    def fork(self, sequence: int) -> int:
        """Return a new sequence with the same tokens, in the same pages."""
        self._require(sequence)
        copy = self.allocate()
        self._pages[copy], self._tokens[copy] = [*self._pages[sequence]], self._tokens[sequence]
        for page in self._pages[copy]:
            self._users[page] += 1
        self._publish([copy])
        return copy

    def free(self, sequence: int) -> None:
        """Give up a sequence, and the pages that no other one uses."""
        self._require(sequence)
        for page in self._pages.pop(sequence):
            self._release(page)
        del self._tokens[sequence]
        self._free_sequences.append(sequence)
        self.lengths[sequence] = 0

    def reserve(self, sequences: Sequence[int], tokens: int = 1) -> None:
        """Make room for this number of tokens after the last one of each sequence.

        A page that would be written to and belongs to another sequence, too, is copied. Where pages run out, nothing
        changes.
        """
        self._check(sequences, tokens)
        for sequence in sequences:
            if self._tokens[sequence] + tokens > self.capacity:
                total = self._tokens[sequence] + tokens
                raise ValueError(f"sequence {sequence} would have {total} tokens, more than {self.capacity}")
        needed = sum(max(0, self._needed(sequence, tokens)) for sequence in sequences) + self._copies(sequences, tokens)
        if needed > self.free_pages:
            raise RuntimeError(
                f"{needed} pages are needed, but {self.free_pages} are free: free a sequence, or create a cache of more"
            )
        changed = []
        for sequence in sequences:
            pages, before = self._pages[sequence], [*self._pages[sequence]]
            for n in self._written(sequence, tokens):
                if self._users[pages[n]] > 1:
                    pages[n] = self._copy(pages[n])
            pages += [self._take() for _ in range(self._needed(sequence, tokens))]
            changed += [sequence] if pages != before else []
        if changed:
            self._publish(changed)

    def advance(self, sequences: Sequence[int], tokens: int = 1) -> None:
        """Count tokens that were written to reserved room."""
        self._check(sequences, tokens)
        for sequence in sequences:
            if self._needed(sequence, tokens) > 0:
                raise RuntimeError(f"sequence {sequence} has no room for {tokens} more tokens: reserve it first")
        for sequence in sequences:
            self._tokens[sequence] += tokens
        self._publish_lengths(sequences, torch.tensor([*sequences], device=self.lengths.device))

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Append keys and values [layers, len(sequences), tokens, heads, D]."""
        layers, _, _, heads, size = self.keys.shape
        wanted = (layers, len(sequences), k.shape[2] if k.dim() == 5 else -1, heads, size)
        if tuple(k.shape) != wanted or k.shape != v.shape:
            shapes = f"{[*k.shape]} and {[*v.shape]}"
            raise ValueError(f"k and v must be [{layers}, {len(sequences)}, tokens, {heads}, {size}], not {shapes}")
        self.reserve(sequences, k.shape[2])
        rows = torch.tensor([*sequences], device=self.lengths.device)
        lengths, table = self.lengths[rows], self.block_table[rows]
        write = append_kv if is_eligible(k, v, self.keys, lengths) else append_in_torch
        for layer in range(layers):
            caches = self.keys[layer], self.values[layer]
            write(k[layer], v[layer], *caches, lengths, table, None, None, None, None, Append("NHD", False))
        self.advance(sequences, k.shape[2])

    def _check(self, sequences: Sequence[int], tokens: int) -> None:
        if len({*sequences}) != len(sequences):
            raise ValueError("a sequence is given twice")
        if tokens < 0:
            raise ValueError(f"the number of tokens must not be negative, but it is {tokens}")
        for sequence in sequences:
            self._require(sequence)

    def _require(self, sequence: int) -> None:
        if sequence not in self._tokens:
            raise KeyError(f"there is no sequence {sequence}: it was never allocated, or is free")

    def _needed(self, sequence: int, tokens: int) -> int:
        """Return the number of pages that a sequence lacks."""
        return -(-(self._tokens[sequence] + tokens) // self.page) - len(self._pages[sequence])

    def _written(self, sequence: int, tokens: int) -> range:
        """Return which of its pages a sequence writes to when it grows by that many tokens."""
        before = self._tokens[sequence]
        after = -(-(before + tokens) // self.page) if tokens else 0
        return range(before // self.page, min(len(self._pages[sequence]), after))

    def _copies(self, sequences: Sequence[int], tokens: int) -> int:
        """Return the number of pages to copy: all users of a page but its last one write to a copy."""
        writers = Counter(self._pages[s][n] for s in sequences for n in self._written(s, tokens))
        return sum(min(count, self._users[page] - 1) for page, count in writers.items())

    def _take(self) -> int:
        page = self._free_pages.pop()
        self._users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self._users[page] -= 1
        if not self._users[page]:
            self._free_pages.append(page)

    def _copy(self, page: int) -> int:
        copy = self._take()
        for cache in (self.keys, self.values):
            cache[:, copy] = cache[:, page]
        self._release(page)
        return copy

    def _publish(self, sequences: Sequence[int]) -> None:
        """Write the pages and lengths of sequences to the GPU, where kernels read them."""
        width = self.block_table.shape[1]
        tables = [self._pages[s] + [0] * (width - len(self._pages[s])) for s in sequences]
        rows = torch.tensor([*sequences], device=self.lengths.device)
        self.block_table[rows] = torch.tensor(tables, dtype=torch.int32).to(self.lengths.device)
        self._publish_lengths(sequences, rows)

    def _publish_lengths(self, sequences: Sequence[int], rows: Tensor) -> None:
        tokens = torch.tensor([self._tokens[s] for s in sequences], dtype=torch.int32)
        self.lengths[rows] = tokens.to(self.lengths.device)
