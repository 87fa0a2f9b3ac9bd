"""The Metal files are found and whole; the kernels themselves are tested in `metal/`, on a simulator or a GPU."""

from __future__ import annotations

import pytest

from mlx_qkvshare.errors import InvalidValueError
from mlx_qkvshare.kernels import kernel_source


@pytest.mark.parametrize("name", ["attend_part", "merge_state", "quantize_pack"])
def test_a_metal_file_is_one_kernel_behind_its_header(name: str) -> None:
    header, body = kernel_source(name)
    assert "#include <metal_stdlib>" in header and "[[kernel]]" not in header + body and "template <\n" not in header
    assert body.count("{") == body.count("}")


def test_unknown_kernel_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="nonesuch"):
        kernel_source("nonesuch")
