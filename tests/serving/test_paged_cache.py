"""A paged cache: what each sequence holds after any order of calls, and how many pages that takes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from support import few_examples
from tilewright.serving import PagedCache

LAYERS, HEADS, SIZE, PAGE = 2, 2, 4, 4


def cache_on(device, pages=12, sequences=4, capacity=20):
    return PagedCache(
        layers=LAYERS, heads=HEADS, head_size=SIZE, pages=pages, page=PAGE, sequences=sequences, capacity=capacity,
        dtype=torch.float32, device=device,
    )  # fmt: skip


def tokens(device, sequences, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LAYERS, sequences, count, HEADS, SIZE)
    return torch.randn(shape, generator=generator).to(device).unbind(0)


def held(cache, sequence):
    """Return the keys and values of a sequence, [2, layers, tokens, heads, D], found by the tables on the device."""
    length, page = int(cache.lengths[sequence]), cache.page
    at = torch.arange(length, device=cache.lengths.device)
    pages = cache.block_table[sequence].long()[at // page]
    return torch.stack([x[:, pages, at % page] for x in (cache.keys, cache.values)])


def test_sequences_hold_what_was_appended(device):
    cache = cache_on(device)
    a, b = cache.allocate(), cache.allocate()
    k, v = tokens(device, 2, 5)
    cache.append([a, b], k, v)
    more = tokens(device, 1, 6, seed=1)
    cache.append([b], *more)
    assert torch.equal(held(cache, a), torch.stack([k[:, 0], v[:, 0]]))
    assert torch.equal(held(cache, b), torch.cat([torch.stack([k[:, 1], v[:, 1]]), torch.stack(more)[:, :, 0]], 2))
    assert (cache.length(a), cache.length(b), cache.free_pages) == (5, 11, 12 - 2 - 3)
    cache.free(b)
    assert cache.free_pages == 10
    assert int(cache.lengths[b]) == 0


def test_a_fork_shares_pages_until_one_of_them_writes(device):
    cache = cache_on(device)
    a = cache.allocate()
    cache.append([a], *tokens(device, 1, 6))
    before = held(cache, a)
    b = cache.fork(a)
    assert cache.free_pages == 10
    assert torch.equal(held(cache, b), before)
    cache.append([b], *tokens(device, 1, 1, seed=1))
    assert cache.free_pages == 9  # the last page, which was half full, was copied
    assert torch.equal(cache.block_table[a, :1], cache.block_table[b, :1])
    assert int(cache.block_table[a, 1]) != int(cache.block_table[b, 1])
    assert torch.equal(held(cache, b)[:, :, :6], before)
    cache.append([a], *tokens(device, 1, 1, seed=2))
    assert cache.free_pages == 9  # it is the only user of the original by now
    assert torch.equal(held(cache, a)[:, :, :6], before)
    cache.free(a)
    assert torch.equal(held(cache, b)[:, :, :6], before)
    cache.free(b)
    assert cache.free_pages == 12


def test_a_fork_at_the_end_of_a_page_copies_nothing(device):
    cache = cache_on(device)
    a = cache.allocate()
    cache.append([a], *tokens(device, 1, PAGE))
    b = cache.fork(a)
    cache.append([a, b], *tokens(device, 2, 1))
    assert cache.free_pages == 12 - 3


@few_examples
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["allocate", "fork", "append", "free"]), st.integers(0, 3), st.integers(1, 7)),
        max_size=16,
    )
)
def test_any_order_of_calls(steps, device):
    """A dictionary of tensors is the expected content; the pages in use are those that some sequence needs."""
    cache, expected = cache_on(device), {}
    for number, (what, which, count) in enumerate(steps):
        sequence = sorted(expected)[which % len(expected)] if expected else None
        if what == "allocate" and len(expected) < 4:
            expected[cache.allocate()] = torch.zeros(2, LAYERS, 0, HEADS, SIZE, device=device)
        elif sequence is None:
            continue
        elif what == "fork" and len(expected) < 4:
            expected[cache.fork(sequence)] = expected[sequence]
        elif what == "free":
            cache.free(sequence)
            del expected[sequence]
        elif what == "append":
            new = tokens(device, 1, count, seed=number)
            try:
                cache.append([sequence], *new)
            except (RuntimeError, ValueError):  # full
                continue
            expected[sequence] = torch.cat([expected[sequence], torch.stack(new)[:, :, 0]], 2)
        for one, content in expected.items():
            assert torch.equal(held(cache, one), content)
        used = {int(p) for s in expected for p in cache.block_table[s][: -(-cache.length(s) // PAGE)]}
        assert cache.free_pages == 12 - len(used)


def test_attention_writes_to_reserved_room(device):
    cache = cache_on(device)
    a, b = cache.allocate(), cache.allocate()
    k, v = tokens(device, 2, 6)
    cache.append([a, b], k[:, :, :5], v[:, :, :5])
    cache.reserve([a, b])
    q = torch.randn(4, 1, 4, SIZE, device=device)  # the rows of all sequences, also of those that are not in use
    unused = torch.zeros(2, 1, HEADS, SIZE, device=device)
    cache.reserve([c := cache.allocate(), d := cache.allocate()])
    new = [torch.cat([x[0, :, 5:], unused]) for x in (k, v)]
    out = tw.decode_attention(
        q, cache.keys[0], cache.values[0], cache.lengths, cache.block_table, k_new=new[0], v_new=new[1]
    )
    cache.advance([a, b])
    lengths = torch.full((2,), 6, dtype=torch.int32, device=device)
    torch.testing.assert_close(out[:2], tw.decode_attention(q[:2], k[0], v[0], lengths))
    assert (cache.length(a), cache.length(c), cache.length(d)) == (6, 0, 0)


def test_the_tables_never_move(device):
    cache = cache_on(device)
    places = cache.lengths.data_ptr(), cache.block_table.data_ptr()
    a = cache.allocate()
    cache.append([a], *tokens(device, 1, 9))
    cache.fork(a)
    cache.free(a)
    assert (cache.lengths.data_ptr(), cache.block_table.data_ptr()) == places


def test_room_reserved_before_a_fork_is_not_shared(device):
    cache = cache_on(device)
    a = cache.allocate()
    cache.append([a], *tokens(device, 1, 3))
    cache.reserve([a], 6)
    b = cache.fork(a)
    for sequence, seed in ((b, 1), (a, 2)):
        cache.append([sequence], *tokens(device, 1, 6, seed))
    for sequence, seed in ((b, 1), (a, 2)):
        wanted = [
            torch.cat(pair, 2)[:, 0] for pair in zip(tokens(device, 1, 3), tokens(device, 1, 6, seed), strict=True)
        ]
        assert torch.equal(held(cache, sequence), torch.stack(wanted))


def test_reserved_room_of_one_sequence_is_no_room_for_another(device):
    cache = cache_on(device, pages=5)
    a, b = cache.allocate(), cache.allocate()
    cache.reserve([a], 16)
    with pytest.raises(RuntimeError, match="3 pages are needed, but 1 are free"):
        cache.reserve([a, b], 12)
    assert cache.free_pages == 1


def test_errors_are_one_sentence_and_change_nothing(device):
    cache = cache_on(device, pages=3, sequences=2, capacity=11)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a], *tokens(device, 1, 6))
    before = held(cache, a)
    calls = (
        (RuntimeError, "all 2 sequences are in use", cache.allocate),
        (RuntimeError, "2 pages are needed, but 1 are free", lambda: cache.append([b], *tokens(device, 1, 5))),
        (ValueError, "would have 12 tokens, more than 11", lambda: cache.reserve([a], 6)),
        (RuntimeError, "has no room for 3 more tokens", lambda: cache.advance([a], 3)),
        (ValueError, "given twice", lambda: cache.reserve([a, a])),
        (ValueError, "given twice", lambda: cache.advance([a, a], 1)),
        (ValueError, "must not be negative", lambda: cache.advance([a], -1)),
        (ValueError, "k and v must be", lambda: cache.append([a], *(x[..., :3] for x in tokens(device, 1, 1)))),
        (KeyError, "there is no sequence 7", lambda: cache.free(7)),
        (ValueError, "pages must be positive", lambda: cache_on(device, pages=0)),
    )
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert cache.free_pages == 1
    assert torch.equal(held(cache, a), before)
