"""Digests see every bit and its place, in every dtype, whatever the strides of a tensor are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.core.sharding import DTYPES
from rankmesh.guard import digest as module
from rankmesh.guard.digest import combined, digest, digests, first_difference, summed

MASK = 2**64 - 1


def hashed(value, place):
    """One output of splitmix64, in Python's own arithmetic."""
    x = value + place * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def signed(total):
    """A number modulo 2^64 as an int64."""
    total &= MASK
    return total - 2**64 if total >> 63 else total


def of_values(values):
    """The digest of sums."""
    return signed(sum(hashed(value, place) for place, value in enumerate(values, 1)))


def of_bytes(data, row, size):
    """The digest of bytes, word by word, with rows and blocks of these sizes."""
    words = [int.from_bytes(data[start : start + 8], "little") for start in range(0, len(data), 8)]
    rows, values = len(data) // 8 // row, []
    for start in range(0, rows, size):
        block = [words[number * row : (number + 1) * row] for number in range(start, min(start + size, rows))]
        values += [sum(each) for each in block] + [sum(each) for each in zip(*block, strict=True)]
    return of_values([value & MASK for value in values + words[rows * row :]])


def raw(dtype, size, seed):
    """A tensor of random bits: NaNs with payloads and negative zeros among them."""
    itemsize = DTYPES[dtype]
    bits = torch.randint(0, 256, (size * itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (bits & 1 if dtype == "bool" else bits).view(getattr(torch, dtype))


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", DTYPES)
@given(size=st.integers(1, 70), seed=st.integers(0, 2**32), data=st.data())
def test_a_flipped_bit_shows(dtype, size, seed, data):
    """Of any dtype, at any place."""
    one = raw(dtype, size, seed)
    other = one.clone()
    at = data.draw(st.integers(0, one.nbytes - 1))
    bit = 1 if dtype == "bool" else 1 << data.draw(st.integers(0, 7))
    other.view(torch.uint8)[at] ^= bit
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(other)


@given(size=st.integers(2, 5000), seed=st.integers(0, 2**32), data=st.data())
def test_several_flipped_bits_show(size, seed, data):
    """The highest ones of two words too, of which a sum times odd numbers alone would see nothing."""
    one = raw("float32", size, seed)
    other = one.clone()
    for at in data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=4)):
        other.view(torch.int32)[at] ^= -(2**31)
    assert digest(one) != digest(other)


@given(
    size=st.integers(0, 90), seed=st.integers(0, 2**32), dtype=st.sampled_from(["float32", "int8", "complex64"]),
    row=st.integers(1, 9), block=st.integers(1, 5), start=st.integers(0, 8),
)  # fmt: skip
def test_it_is_what_its_page_describes(size, seed, dtype, row, block, start):
    """Rows, columns and what is left, with rows and blocks of any size, wherever in memory the tensor begins."""
    tensor = raw(dtype, size + start, seed)[start:]
    data = bytes(tensor.contiguous().view(torch.uint8).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROW", row)
        patch.setattr(module, "_CPU", block)
        assert int(digest(tensor)) == of_bytes(data, row, block)


@given(shape=st.lists(st.integers(0, 9), max_size=4), seed=st.integers(0, 2**32), data=st.data())
def test_strides_change_nothing_and_places_do(shape, seed, data):
    """A tensor has the digest of its contiguous copy, and another one than with its elements elsewhere."""
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    order = data.draw(st.permutations(range(len(shape))))
    strided = tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(shape))])
    assert strided.shape == tensor.shape
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROW", data.draw(st.sampled_from([1, 2, 8, 1024])))
        assert digest(strided) == digest(tensor)
        if tensor.numel() > 1:
            rolled = tensor.reshape(-1).roll(1).reshape(shape)
            assert digest(rolled) != digest(tensor) or torch.equal(rolled, tensor)


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 2**32))
def test_several_at_once(sizes, seed):
    """Each tensor has the digest that it has by itself, whatever is beside it; a rank may hold none."""
    tensors = [raw("float32", size, seed + size) for size in sizes]
    assert digests(tensors, torch.device("cpu")).tolist() == [int(digest(one)) for one in tensors]


def test_conjugates_and_negatives_are_what_they_stand_for():
    """Lazy views of torch, of which the memory says something else."""
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert digest(tensor.conj()) == digest(tensor.conj().resolve_conj())
    assert digest(tensor.conj().imag) == digest(tensor.conj().imag.clone())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_several_digests_are_one(given):
    """Whose order counts."""
    parts = torch.tensor(given, dtype=torch.int64)
    assert int(combined(parts, parts.device)) == of_values(given)


@given(
    size=st.integers(1, 300), seed=st.integers(0, 2**32), dtype=st.sampled_from(["float32", "bfloat16", "float64"]),
    data=st.data(),
)  # fmt: skip
def test_sums_show_where_tensors_differ(size, seed, dtype, data):
    """The element of a flipped bit, and the bit; of several elements, that there are more."""
    one = raw(dtype, size, seed)
    other, bits = one.clone(), 8 * one.element_size()
    at = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=3))
    bit = data.draw(st.integers(0, bits - 1))
    for place in at:
        other.view(torch.uint8)[place * bits // 8 + bit // 8] ^= 1 << bit % 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROW", data.draw(st.integers(1, 9)))
        patch.setattr(module, "_CPU", data.draw(st.integers(1, 5)))
        place, change, single = first_difference(*(summed([each])[0] for each in (one, other)), one.nbytes, "cpu")
        if len(at) == 1:
            inside = place % 8 * 8 + bit % 8
            assert (place * 8 // bits, single) == (*at, True)
            assert change in (2**inside, 2**64 - 2**inside)
        else:
            assert not single or len({each * bits // 64 for each in at}) == 1
