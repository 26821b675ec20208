import pytest
import torch

from rankmesh.dialects.ezpz import divide_and_check_no_remainder, ensure_divisibility, split_tensor_along_last_dim


@pytest.mark.parametrize(("numerator", "denominator"), [(10, 4), (1, 2), (4, 0)])
def test_what_does_not_divide_asserts(numerator, denominator):
    """A remainder, or nothing to divide by, is an AssertionError and a ValueError."""
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=f"{denominator} does not divide {numerator}"):
            ensure_divisibility(numerator, denominator)
        with pytest.raises(error):
            divide_and_check_no_remainder(numerator, denominator)


def test_pieces_of_the_last_dimension():
    """Pieces put together are the tensor; they are views of it unless asked to be contiguous."""
    tensor = torch.arange(24.0).reshape(2, 12)
    pieces = split_tensor_along_last_dim(tensor, 3)
    assert torch.equal(torch.cat(pieces, dim=-1), tensor)
    assert [piece.is_contiguous() for piece in pieces] == [False] * 3
    assert pieces[1].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert [piece.is_contiguous() for piece in split_tensor_along_last_dim(tensor, 3, True)] == [True] * 3
    with pytest.raises(AssertionError, match="5 does not divide 12"):
        split_tensor_along_last_dim(tensor, 5)
